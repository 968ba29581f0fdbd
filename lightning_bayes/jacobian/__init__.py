"""The inside of a network: its layers and their calls, gradients at their outputs, and products with the Jacobian."""
