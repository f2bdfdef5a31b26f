"""Who runs next. Plain Python and NumPy: no torch, no clock."""
