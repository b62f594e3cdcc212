"""The log of a search: optuna's study of the trials, kept in a file in which a search that was killed goes on.

The module knows optuna, and not what is searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.core.errors import InvalidRequest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import optuna


def open_study(output: str | Path | None, setup: Mapping[str, Any], seed: int) -> optuna.Study:
    """Opens the log of the trials, or begins it.

    Args:
        output: beside which file the log lies; None keeps none.
        setup: what must not change between the parts of a search.
        seed: of the search.

    Raises:
        InvalidRequest: the log is none, or was begun with another setup.
        ImportError: optuna is not installed.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise ImportError("the search needs optuna: pip install 'draftwood[search]'") from error
    storage, log = None, None
    if output is not None:
        path = Path(output).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.with_name(path.name + ".trials")
        _drop_torn_line(log)
        try:
            storage = JournalStorage(JournalFileBackend(str(log), _lock(log)))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{log} is no log of a search ({error}); delete it, or give another output") from error
    study = optuna.create_study(storage=storage, study_name="layers", direction="maximize", load_if_exists=True)
    # A sampler begins anew with each call; the same draws again would be the same candidates again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + finished_trials(study))
    begun = study.user_attrs.get("setup")
    if begun is None:
        study.set_user_attr("setup", dict(setup))
    elif begun != setup:
        other = {name: begun.get(name) for name in setup if begun.get(name) != setup[name]}
        raise InvalidRequest(
            f"{log} was begun with {other}, this search has { {name: setup[name] for name in other} }; "
            "delete it, or give another output"
        )
    return study


def _drop_torn_line(log: Path) -> None:
    """Cuts off what a process that was killed had not written to its end; the next line would be glued to it."""
    if log.is_file() and not (content := log.read_bytes()).endswith(b"\n"):
        with log.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class _LogLock:
    """A lock of the operating system, which goes with its process; optuna's own stays behind one that is killed."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def acquire(self) -> bool:
        self._file = self._log.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        self._file.close()


def _lock(log: Path) -> Any:
    """Returns what optuna locks the log with; None, for its own, where the system has no such locks."""
    return None if fcntl is None else _LogLock(log)


def state(name: str) -> optuna.trial.TrialState:
    """Returns a state of a trial by its name."""
    from optuna.trial import TrialState

    return TrialState[name]


def finished_trials(study: optuna.Study) -> int:
    """Returns how many trials are done, by whichever process."""
    return sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
