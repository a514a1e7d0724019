"""Stores: one file each."""
