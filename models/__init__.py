"""Click-through-rate models, one file each."""
