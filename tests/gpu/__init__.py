"""What only a GPU can show: `run` starts the tests marked `gpu`, and `report` measures."""
