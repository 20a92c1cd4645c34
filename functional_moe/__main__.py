"""The command line: ``functional-moe COMMAND`` or ``python -m functional_moe COMMAND``.

A mistake of the user's ends in one line on standard error and exit status 2; a mistake of ours in a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from .commands.info import InfoSettings, info
from .commands.sample import SampleSettings, sample
from .commands.settings import SettingsError, TrainSettings, read_settings
from .commands.tokenize import TokenizeSettings, tokenize
from .commands.train import SETTINGS_FILE, train
from .config import preset
from .data import DataError
from .state_file import StateError


def _train_defaults(arguments: Sequence[str]) -> TrainSettings:
    """What the flags of ``train`` change: the settings of the run that is resumed, or the preset's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    if given.resume and given.out is not None:
        return read_settings(given.out / SETTINGS_FILE)
    return TrainSettings(preset=given.preset, model=preset(given.preset))


def run(arguments: Sequence[str]) -> int:
    """Parses ``arguments`` and runs their command.

    Raises:
      SettingsError, DataError, StateError: whatever the user can mend.
    """
    try:
        defaults = _train_defaults(arguments) if arguments[:1] == ["train"] else TrainSettings()
        settings = tyro.cli(
            Annotated[TrainSettings, tyro.conf.subcommand("train", default=defaults)]
            | Annotated[SampleSettings, tyro.conf.subcommand("sample")]
            | Annotated[InfoSettings, tyro.conf.subcommand("info")]
            | Annotated[TokenizeSettings, tyro.conf.subcommand("tokenize")],
            prog="functional-moe",
            description="Mixture-of-Experts training as pure functions.",
            args=list(arguments),
        )
    except (DataError, StateError, SettingsError):
        raise
    except ValueError as error:  # from the checks of the configurations
        raise SettingsError(str(error)) from error
    if isinstance(settings, TrainSettings):
        return train(settings)
    if isinstance(settings, SampleSettings):
        return sample(settings)
    if isinstance(settings, InfoSettings):
        return info(settings)
    return tokenize(settings)


def main() -> None:
    """The entry point of the ``functional-moe`` command."""
    try:
        status = run(sys.argv[1:])
    except (SettingsError, DataError, StateError) as error:
        print(f"functional-moe: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
