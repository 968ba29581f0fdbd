"""What the tests of several folders share: `from helpers.tensors import real`."""
