"""Gemma 3 270M in four kinds of quantized blocks: it says what the reference says.

Its packages fall under Gemma's own terms and are nobody's dependency: where they are absent, the
tests say how to install them.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.engines import GOLDEN, Work, hidden_of, run_tokens
from tests.golden.real.gemma_file import find_parts, join
from tests.golden.real.prompts import GEMMA_WINDOW, PROMPTS, TEXT, windows
from tests.real.model import RealModel
from tests.real.perplexity import perplexity, text_logprobs

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

REAL_GOLDEN = GOLDEN.parent / "real"
