"""`python serve.py --model …` is `jaxinfer serve --model …`."""

import sys

from jaxinfer.cli import app

if __name__ == "__main__":
    app(["serve", *sys.argv[1:]], prog_name="jaxinfer")
