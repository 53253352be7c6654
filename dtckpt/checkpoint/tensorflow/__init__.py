"""Checkpoint calls under the names of tf.experimental.dtensor."""
