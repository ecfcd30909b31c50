"""The real worker with a scripted model in place of a real one.

python -m tests.support.scripted_worker --port 0 --model scripted
"""

from __future__ import annotations

from stallfree_worker.main import main
from tests.support.scripted import load_scripted_model

if __name__ == "__main__":
    main(load_scripted_model)
