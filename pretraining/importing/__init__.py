"""Configuration files of other trainers, read into a TrainConfig with one record for each of their keys.

`read_import` is the way in; each format is a table from its key to a rule (nxdt.py, nemo.py, neox.py).
"""
