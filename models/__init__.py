"""Runnable models, one file each: `python -m models.treelstm --help`. Read `models/treelstm.py` first."""
