"""The small JSON file in which a search leaves the layers it has chosen, and a drafter finds them.

    {"drafter": "layer-skip",
     "target": {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152},
     "options": {"attention": [3, 8], "mlp": [8, 21]},
     "search": {"objective": "proxy", "value": 1.31, ...}}

`target` is what the choice is good for, `search` is for the reader. The module knows no drafter by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InvalidCheckpoint
from ..core.target import Target

_FINGERPRINT = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")


def save_choice(
    path: Path, target: Target, drafter: str, options: Mapping[str, Any], search: Mapping[str, Any]
) -> None:
    """Writes the file, in one step, so that it is never seen half written.

    Args:
        path: where to; folders are made.
        target: the model that the layers were chosen for.
        drafter: what the options are options of.
        options: the chosen layers.
        search: how they were found.
    """
    content = {"drafter": drafter, "target": _describe(target), "options": options, "search": search}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_choice(path: str | Path, target: Target, drafter: str) -> dict[str, Any]:
    """Returns the options in the file.

    Raises:
        InvalidCheckpoint: no such file, not JSON, for another drafter or for another model.
    """
    path = Path(path).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(
            f"cannot read {path}: {error.strerror}; `draftwood search {drafter}` writes such a file"
        ) from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{path} is not JSON: {error}") from error
    for key in ("drafter", "target", "options"):
        if not isinstance(content, dict) or key not in content:
            raise InvalidCheckpoint(f"{path} has no {key!r}; it is no result of `draftwood search`")
    if content["drafter"] != drafter:
        raise InvalidCheckpoint(f"{path} holds layers for the drafter {content['drafter']!r}, not for {drafter!r}")
    if content["target"] != _describe(target):
        raise InvalidCheckpoint(
            f"{path} was made for another model: {content['target']}; this target is {_describe(target)}"
        )
    options = content["options"]
    if not isinstance(options, dict):
        raise InvalidCheckpoint(f"{path}: 'options' must be an object, got {options!r}")
    return options


def _describe(target: Target) -> dict[str, Any]:
    return {name: getattr(target.config, name, None) for name in _FINGERPRINT}
