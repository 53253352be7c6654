"""Read open checkpoints: verified reads of chunks and regions."""
