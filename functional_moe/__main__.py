"""The command line: ``functional-moe COMMAND`` or ``python -m functional_moe COMMAND``.

A mistake of the user's ends in one line on standard error and exit status 2; a mistake of ours in a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

try:
    import tyro

    from .commands.calibrate import CalibrateSettings, calibrate
    from .commands.exchange import ExportSettings, ImportSettings, export_model, import_model
    from .commands.info import InfoSettings, info
    from .commands.plan import PlanSettings, plan
    from .commands.program import end
    from .commands.rank import run_as_rank
    from .commands.sample import SampleSettings, sample
    from .commands.settings import DataSettings, SettingsError, TrainSettings, read_settings
    from .commands.tokenize import TokenizeSettings, tokenize
    from .commands.train import SETTINGS_FILE, train
    from .config import preset
    from .parallel import launched
    from .state_file import StateError
except KeyboardInterrupt:  # torch takes a second to be imported
    sys.stderr.write("functional-moe: interrupted\n")
    sys.exit(130)


def _train_defaults(arguments: Sequence[str]) -> TrainSettings:
    """What the flags of ``train`` change: the settings of the run that is resumed, or the preset's."""
    # Only what decides the defaults is looked for; what is missing or wrong is left to the real parser.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    parser.add_argument("--out", type=Path, nargs="?")
    parser.add_argument("--init-from", type=Path, nargs="?")
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    if given.resume and given.out is not None:
        stored = read_settings(given.out / SETTINGS_FILE)
        return dataclasses.replace(stored, out=given.out, stop_after=None, profile=None)
    if given.init_from is not None:
        if given.preset is not None:
            raise SettingsError(f"--preset {given.preset}: --init-from {given.init_from} says which model it is")
        start = read_settings(given.init_from / SETTINGS_FILE)
        tokenizer = DataSettings(tokenizer=start.data.tokenizer, separator_token=start.data.separator_token)
        seq_len = min(TrainSettings.seq_len, start.model.max_position_embeddings)
        return TrainSettings(preset=start.preset, model=start.model, data=tokenizer, seq_len=seq_len)
    name = given.preset or "tiny"
    return TrainSettings(preset=name, model=preset(name))


Settings = (
    TrainSettings
    | SampleSettings
    | InfoSettings
    | TokenizeSettings
    | ImportSettings
    | ExportSettings
    | PlanSettings
    | CalibrateSettings
)


def _parse(arguments: Sequence[str]) -> Settings:
    try:
        defaults = _train_defaults(arguments) if arguments[:1] == ["train"] else TrainSettings()
    except (StateError, SettingsError):
        raise
    except ValueError as error:  # an unknown preset
        raise SettingsError(str(error)) from error
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(
                Annotated[TrainSettings, tyro.conf.subcommand("train", default=defaults)]
                | Annotated[SampleSettings, tyro.conf.subcommand("sample")]
                | Annotated[InfoSettings, tyro.conf.subcommand("info")]
                | Annotated[TokenizeSettings, tyro.conf.subcommand("tokenize")]
                | Annotated[ImportSettings, tyro.conf.subcommand("import")]
                | Annotated[ExportSettings, tyro.conf.subcommand("export")]
                | Annotated[PlanSettings, tyro.conf.subcommand("plan")]
                | Annotated[CalibrateSettings, tyro.conf.subcommand("calibrate")],
                prog="functional-moe",
                description="Mixture-of-Experts training as pure functions.",
                args=list(arguments),
            )
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise SettingsError(_unboxed(boxed.getvalue())) from stop


def _unboxed(text: str) -> str:
    """The message in one of tyro's boxes, as one line: what stands between its title and the next rule."""

    def is_rule(line: str) -> bool:
        return not line.strip("│|╭╮╰╯─-+ ")

    lines = itertools.dropwhile(is_rule, text.splitlines()[1:])
    message = " ".join(line.strip("│| ") for line in itertools.takewhile(lambda line: not is_rule(line), lines))
    # Where a configuration refused its values, tyro names the class or a place in its own terms.
    message = re.sub(r"^Error parsing (?!--)\S+: ", "", " ".join(message.split()))
    return f"{message} (--help lists the flags)"


def run(arguments: Sequence[str]) -> int:
    """Parses ``arguments`` and runs their command.

    Raises:
      SettingsError, DataError, StateError, CheckpointError, HFError: whatever the user can mend.
    """
    settings = _parse(arguments)
    if isinstance(settings, TrainSettings):
        return train(settings)
    if isinstance(settings, SampleSettings):
        return sample(settings)
    if isinstance(settings, InfoSettings):
        return info(settings)
    if isinstance(settings, ImportSettings):
        return import_model(settings)
    if isinstance(settings, ExportSettings):
        return export_model(settings)
    if isinstance(settings, PlanSettings):
        return plan(settings)
    if isinstance(settings, CalibrateSettings):
        return calibrate(settings)
    return tokenize(settings)


def main() -> None:
    """The entry point of the ``functional-moe`` command."""
    if launched() is not None:
        run_as_rank(lambda: _parse(sys.argv[1:]))
    end(lambda: run(sys.argv[1:]), "functional-moe")


if __name__ == "__main__":
    main()
