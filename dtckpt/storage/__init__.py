"""Storage: back ends, arrays, and the commit, by which a checkpoint appears whole or not at all."""
