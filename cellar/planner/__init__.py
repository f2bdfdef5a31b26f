"""Which bytes live where, how a model is split, and what that costs, before it runs: pure functions over specs."""
