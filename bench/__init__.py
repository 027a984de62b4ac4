"""dynbatch beside DyNet and PyTorch on the same models, weights and minibatches: ``python -m bench``."""
