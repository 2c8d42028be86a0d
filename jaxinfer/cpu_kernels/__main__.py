"""`python -m jaxinfer.cpu_kernels`: compile the kernels now instead of on first use."""

from __future__ import annotations

import sys

from jaxinfer.cpu_kernels.build import BuildError, load_library


def main() -> None:
    """Say what there is; never fail, since the engine runs without."""
    try:
        sys.stdout.write(f"CPU kernels for {', '.join(load_library().isa_names)}\n")
    except BuildError as error:
        sys.stdout.write(f"no CPU kernels, plain XLA instead: {error}\n")


if __name__ == "__main__":
    main()
