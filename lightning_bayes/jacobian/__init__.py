"""The layers of a network: their calls, the gradients at their outputs, and products with the Jacobian."""
