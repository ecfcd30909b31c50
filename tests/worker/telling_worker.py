"""The real worker with a model that is never loaded: its loader fails, and tells the settings that it was given."""

from __future__ import annotations

from stallfree_worker.loaded_model import LoadedModel, OnTokenizer
from stallfree_worker.main import main
from stallfree_worker.settings import WorkerSettings


def tell_settings(settings: WorkerSettings, on_tokenizer: OnTokenizer) -> LoadedModel:
    del on_tokenizer
    raise RuntimeError(settings.model_dump_json())


if __name__ == "__main__":
    from tests.worker.telling_worker import tell_settings as load  # by its importable name, for the engine's process

    main(load)
