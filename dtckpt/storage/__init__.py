"""Bytes on storage: arrays through TensorStore, directories that appear whole or not at all."""
