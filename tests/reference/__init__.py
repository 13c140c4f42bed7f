"""Float64 evaluation of decoder models, sharing no code with Headrace: the yardstick of the golden files."""
