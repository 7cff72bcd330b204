"""A PyTorch module: loaded, optimized and run by taso; and the same by `torch.compile(module, backend="taso")`.

Needs the extra `torch` (pip install 'taso[torch]').
"""

from __future__ import annotations

import sys

from common import options

import taso

try:
    import torch

    import taso.torch_backend  # makes the name known where taso is not installed
except ImportError as error:
    torch = None
    missing = str(error)

SIZE = 64


def module() -> torch.nn.Module:
    """Two convolutions on one input, normalized and added."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = torch.nn.Conv2d(3, 32, 3, padding=1)
            self.right = torch.nn.Conv2d(3, 32, 1)
            self.norm = torch.nn.BatchNorm2d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.left(x))) + torch.relu(self.right(x))

    return Branches().eval()


def main() -> None:
    settings = options("Optimizes a PyTorch module.").parse_args()
    if torch is None:
        sys.exit(f"error: this example needs PyTorch: pip install 'taso[torch]' ({missing})")
    model, x = module(), torch.randn(1, 3, SIZE, SIZE)
    chosen = {name: getattr(settings, name) for name in ("alpha", "budget", "backend", "threads", "time_limit")}
    best = taso.optimize(taso.load(model, example_inputs=(x,)), **chosen)
    print(best.report)
    with torch.inference_mode():
        expected = model(x)
        (name,) = best.input_names
        ours = taso.compile(best, settings.backend, settings.threads)({name: x.numpy()})
        compiled = torch.compile(model, backend="taso", options=chosen)(x)
        for what, found in (("taso.compile", torch.from_numpy(*ours.values())), ("torch.compile", compiled)):
            print(f"{what}: largest difference from PyTorch {(found - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
