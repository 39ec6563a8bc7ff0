"""msrun: start, supervise and configure distributed PyTorch jobs.

Importing this package imports no torch.
"""

__version__ = "0.1.0"
