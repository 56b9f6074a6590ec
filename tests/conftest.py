"""What several test files share is in tests/helpers, importable by its plain name."""

import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent / "helpers"
sys.path.append(str(HELPERS))
pytest.register_assert_rewrite(*(path.stem for path in HELPERS.glob("*.py")))
