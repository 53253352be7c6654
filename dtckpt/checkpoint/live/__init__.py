"""Live checkpoints: a job publishes versions of its weights from memory, and other jobs restore them onto their mesh."""
