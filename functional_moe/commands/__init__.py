"""The commands ``train``, ``sample``, ``info``, ``tokenize``: each a dataclass of settings and a function of it."""
