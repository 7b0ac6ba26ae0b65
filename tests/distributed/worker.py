"""What the two processes of a test do: started by torchrun with settings and a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from deepenough.config import resolve
from deepenough.errors import UserError
from deepenough.par.config import ParSearchConfig
from deepenough.par.search import SearchTask
from deepenough.par.training import search
from deepenough.training.config import TrainingConfig
from deepenough.training.distributed import make_accelerator, on_main
from deepenough.training.trainer import Trainer


class Stopped(Exception):
    """Stands for a kill of both processes."""


def run(settings: dict[str, Any], stop: int | None = None) -> None:
    """Search; with `stop`, end at the beginning of that step."""
    step = Trainer._step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == stop:
            raise Stopped
        return step(self, number)

    Trainer._step = interrupted  # type: ignore[method-assign]
    try:
        search(resolve(ParSearchConfig, None, settings))
    except Stopped:
        pass
    finally:
        Trainer._step = step  # type: ignore[method-assign]


def watch_gradients() -> list[bool]:
    """From now on, whether all processes have the same gradient and scores at every step."""
    same: list[bool] = []
    end_step, phase = SearchTask.end_step, Trainer._phase

    def everywhere(value: torch.Tensor) -> bool:
        parts = [torch.zeros_like(value) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, value.contiguous())
        return all(torch.equal(part, parts[0]) for part in parts)

    def watched_phase(self: Trainer, number: int, name: str) -> Any:
        task: Any = self.task
        seen: list[torch.Tensor] = []
        for optimizer in self.optimizers.values():
            optimizer.register_step_pre_hook(lambda *_: seen.append(task.choice.alpha.grad.clone()))
        result = phase(self, number, name)
        same.append(bool(seen) and everywhere(seen[-1]) and bool(seen[-1].abs().sum() > 0))
        return result

    def watched_end(self: SearchTask) -> None:
        end_step(self)
        same.append(everywhere(self.choice.alpha.detach()))

    Trainer._phase = watched_phase  # type: ignore[method-assign]
    SearchTask.end_step = watched_end  # type: ignore[method-assign]
    return same


def said_to(accelerator: Any, settings: dict[str, Any]) -> list[str]:
    """What this process hears of errors that the first process finds, or all of them."""

    def refuse() -> None:
        raise UserError("The first process says no.")

    said = []
    for action in (
        lambda: on_main(accelerator, refuse),
        lambda: search(resolve(ParSearchConfig, None, settings)),  # the folder is in use
        lambda: search(
            resolve(ParSearchConfig, None, settings | {"dataset.batch_size": 3, "out": "x"})
        ),
    ):
        try:
            action()
        except UserError as error:
            said.append(str(error))
    return said


def main() -> None:
    settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    accelerator = make_accelerator(TrainingConfig())
    run(settings | {"out": str(folder / "from-one"), "resume": True})
    run(settings | {"out": str(folder / "from-two")}, stop=6)
    said = said_to(accelerator, settings | {"out": str(folder / "from-one")})
    same = watch_gradients()
    run(settings | {"out": str(folder / "watched"), "train.steps": 3})
    answers = {"same": same, "said": said, "processes": accelerator.num_processes}
    (folder / f"answers-{accelerator.process_index}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
