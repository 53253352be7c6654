"""Live checkpoints: a job publishes versions of its state from memory; other jobs restore them onto their mesh."""
