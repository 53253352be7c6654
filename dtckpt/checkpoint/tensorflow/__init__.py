"""The checkpoint calls of ``tf.experimental.dtensor``, under its names."""
