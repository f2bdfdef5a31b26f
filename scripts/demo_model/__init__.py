"""Parts of the demo model's training: text, network, optimiser, training, anti-repeat tuning, export."""
