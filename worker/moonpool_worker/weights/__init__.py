"""Where a model's weights come from: finding, reading, hashing and writing checkpoints."""
