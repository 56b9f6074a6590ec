"""What is saved of a posterior: its arguments and state, the tensors of it, and whether they can be one."""
