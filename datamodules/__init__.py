"""Data sets as hetrec batches: Criteo, synthetic and bring-your-own Parquet. See README.md beside this file."""
