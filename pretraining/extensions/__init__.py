"""What a run may add to the core: one folder each, which main_training.py names."""
