"""Training of very large Mixture-of-Experts models as pure functions on ``torch.func``."""
