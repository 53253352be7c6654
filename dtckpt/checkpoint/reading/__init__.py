"""Open checkpoints: verified reads of their chunks and regions."""
