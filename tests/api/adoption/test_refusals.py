"""Scripts that are no job, by the line that keeps them from being one; their syntax alone decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.adoption.scripts import FUNCTIONS, PLAIN
from headrace.api.adoption.facts import Facts, Frame
from headrace.api.adoption.job_file import write_job
from headrace.api.adoption.loop import Unfit
from headrace.api.adoption.two_lines import write_setup

NAMES = {"model": "model", "optimizer": "optimizer", "loader": "loader"}


def line_of(source: str, text: str) -> int:
    return 1 + source[: source.index(text)].count("\n")


def facts_of(source: str, names: dict[str, str] | None = None) -> Facts:
    """What a dry run of `PLAIN` sees, or of one with a few lines changed."""
    frame = Frame("<module>", 1, line_of(source, "backward("), names or NAMES, ())
    return Facts(
        frames=(frame,),
        loop_line=line_of(source, "in enumerate(loader)"),
        optimizers=1,
        passes=1,
        loaders=1,
        whole=True,
        batch_size=8,
        examples=22,
        steps=5,
    )


STEP = "        optimizer.step()\n"
HEAD = "    for step, (x, y) in enumerate(loader):\n"
LOSS = "        loss = functional.cross_entropy(model(x), y)\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (STEP, STEP + "        if step == 2: break\n", "may end the loop before its last batch"),
        (STEP, "        if step % 2:\n            optimizer.step()\n", "does not step once in every round"),
        (STEP, "        optimizer.step(lambda: loss)\n", "without a closure"),
        (STEP, STEP + "        model[0].weight.data.clamp_(-1, 1)\n", "calls clamp_"),
        (
            STEP,
            STEP + "        for p in model.parameters():\n            p.data = p * 0.9\n",
            "changes what is trained",
        ),
        (STEP, STEP + "        ema.update(model)\n", "may change the training by update"),
        (STEP, STEP + "        model(x)\n", "runs the model once more"),
        (
            HEAD,
            "    for g in optimizer.param_groups:\n        g['lr'] = 0.1\n" + HEAD,
            "sets what the optimizer goes by",
        ),
        (HEAD, "    optimizer.param_groups[0]['lr'] *= 0.5\n" + HEAD, "changes what is trained"),
        (HEAD, "    loader.dataset.stage = epoch\n" + HEAD, "changes what is trained"),
        (HEAD, "    model[0].requires_grad_(epoch > 0)\n" + HEAD, "calls requires_grad_"),
        (
            HEAD,
            "    freeze = getattr(model, 'freeze')\n    setattr(model, 'a', 1)\n" + HEAD,
            "may change the training by setattr",
        ),
        (LOSS, LOSS + "        loss = loss * (step + 1)\n", "depends on step, the number of the batch"),
        (LOSS, LOSS + "        loss = loss * (0.9 ** epoch)\n", "depends on epoch"),
        (LOSS, LOSS + "        loss = loss + 0 * total\n", "takes total from the round before"),
        (
            LOSS,
            LOSS.replace("loss =", "loss = before =") + "        loss = loss + 0 * old\n        old = before\n",
            "takes old",
        ),
        ("        loss.backward()\n", "        loss.backward(retain_graph=True)\n", "differentiates its loss alone"),
        ("        loss.backward()\n", "        if step:\n            loss.backward()\n", "0 of them in every round"),
        ("for epoch in range(2):", "while True:", "how often `while True` goes round"),
        ("for epoch in range(2):", "for epoch in (1, 2):", "how many epochs"),
        (
            "total = 0.0",
            "total = 0.0\nfor warm in range(2):\n    model(inputs).sum().backward()",
            "trains in more than one place",
        ),
        ("total += loss.item()", "total += loss.item()\n        model.eval()", "trains in eval mode"),
        (
            "total += loss.item()",
            "total += loss.item()\nfor x in loader: fit(x)\ndef fit(x): x.backward()",
            "trains once more",
        ),
    ],
)
def test_a_line_that_may_change_the_training_makes_a_script_no_job(old: str, new: str, says: str) -> None:
    assert old in PLAIN
    source = PLAIN.replace(old, new, 1)
    with pytest.raises(Unfit, match=says):
        write_job("train.py", source, facts_of(source))


@pytest.mark.parametrize(
    "new",
    [
        "        print(optimizer.param_groups[0]['lr'], len(loader.dataset))\n",
        "        rates = [optimizer.param_groups[0]['lr']]\n",
        "        torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'a.pt')\n",
        "        history = []\n        history.append(loss.item())\n",
        "        if step % 2 == 0:\n            print(step, loss.item())\n",
    ],
)
def test_lines_that_only_look_are_left_out(new: str) -> None:
    source = PLAIN.replace(STEP, STEP + new)
    assert write_job("train.py", source, facts_of(source)).left_out


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"optimizers": 2}, "2 optimizers make steps in turn"),
        ({"passes": 3}, "3 backward passes are made before one update"),
        ({"loaders": 2}, "2 loaders give batches"),
        ({"loop_line": 0}, "no DataLoader gives the batches"),
        ({"elsewhere": "engine.py"}, "another file, engine.py"),
        ({"examples": 0}, "no number of examples"),
        ({"order": "the loader has a Mine of its own"}, "a Mine of its own"),
    ],
)
def test_what_a_dry_run_saw_makes_a_script_no_job(changed: dict[str, object], says: str) -> None:
    with pytest.raises(Unfit, match=says):
        write_job("train.py", PLAIN, replace(facts_of(PLAIN), **changed))  # type: ignore[arg-type]


def test_the_two_lines_stand_before_the_loop() -> None:
    lines = write_setup(PLAIN, facts_of(PLAIN)).splitlines()
    place = lines.index("for epoch in range(2):")
    assert lines[place - 1] == "model, optimizer, loader = hr.setup(model, optimizer, loader)"
    assert lines[lines.index("from torch.utils.data import DataLoader, TensorDataset") + 1] == "import headrace as hr"
    assert len(lines) == len(PLAIN.splitlines()) + 2
    assert 'reduction="sum")' in write_setup(PLAIN, facts_of(PLAIN), summed=True)


def test_the_first_process_writes_what_a_script_saves() -> None:
    source = PLAIN + "torch.save(model.state_dict(), 'a.pt')\n"
    assert write_setup(source, facts_of(source)).splitlines()[-1] == (
        "hr.processes().on_first(torch.save, model.state_dict(), 'a.pt')"
    )


def test_a_model_that_is_made_in_every_epoch_has_no_place_for_the_two_lines() -> None:
    source = PLAIN.replace(HEAD, "    model = nn.Linear(6, 3)\n" + HEAD)
    with pytest.raises(Unfit, match="model is made anew in the loop"):
        write_setup(source, facts_of(source))


def facts_of_functions(source: str) -> Facts:
    """What a dry run of `FUNCTIONS` sees."""
    names = {"model": "net", "optimizer": "opt"}
    frames = (
        Frame("<module>", 1, line_of(source, "    main()\n"), {}, ()),
        Frame("main", line_of(source, "def main"), line_of(source, "train(args, net, device, held_in"),
              {**names, "loader": "held_in", "arguments": "args", "schedule": "schedule"}, ("device",), ("held_out",)),
        Frame("train", line_of(source, "def train"), line_of(source, "loss.backward"),
              {**names, "loader": "batches", "arguments": "args"}, ("device",)),
    )  # fmt: skip
    arguments = {"clip": 0.5, "smooth": 0.1, "rate": 0.2, "log": 2, "epochs": 3, "short": False}
    line = line_of(source, "in enumerate(batches)")
    return replace(facts_of(PLAIN), frames=frames, loop_line=line, arguments=arguments)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    net.eval()\n", "    net.eval()\n    net.one.weight.data.mul_(0.9)\n", "test .* calls mul_"),
        ("    net.eval()\n", "    net.train()\n    net.eval if 0 else 0\n", "runs the model in train mode"),
        ("        test(net", "        halve(opt)\n        test(net", "halve .* sets what the optimizer goes by"),
        ("        test(net", "        net.one.requires_grad = epoch > 1\n        test(net", "changes what is trained"),
        ("        schedule.step()", "        schedule.step(epoch)", "follows rounds or epochs alone"),
        ("        schedule.step()", "        if epoch: schedule.step()", "does not advance in every round"),
        ("        schedule.step()", "        schedule.step()\n        if epoch: break", "may end the loop"),
        ("            if args.short:", "            if args.log:", "may end the loop"),
        ("args.clip)", "args.clip, norm_type=1)", "clips all gradients by their 2-norm"),
        ("(net.parameters(), args.clip)", "(net.one.parameters(), args.clip)", "clips all gradients"),
    ],
)  # fmt: skip
def test_functions_are_read_as_they_are_called(old: str, new: str, says: str) -> None:
    halve = "def halve(o):\n    for group in o.param_groups:\n        group['lr'] = group['lr'] / 2\n\n\ndef main"
    source = FUNCTIONS.replace("def main", halve).replace(old, new, 1)
    with pytest.raises(Unfit, match=says):
        write_job("train.py", source, facts_of_functions(source))


@pytest.mark.parametrize("again", ["main()\n", "def twice():\n    main()\n\n\ntwice()\n"])
def test_a_script_that_trains_twice_by_one_function_is_no_job(again: str) -> None:
    source = FUNCTIONS + "\n" + again
    with pytest.raises(Unfit, match="trains once more"):
        write_job("train.py", source, facts_of_functions(source))


def test_a_second_training_behind_the_two_lines_is_refused() -> None:
    source = FUNCTIONS.replace(
        '    torch.save(net.state_dict(), "net.pt")', "    train(args, net, device, held_in, opt, 9)"
    )
    assert source != FUNCTIONS
    with pytest.raises(Unfit, match="trains once more, which is not seen"):
        write_setup(source, facts_of_functions(source))
    # Here the two lines are called again.
    again = FUNCTIONS + "\nmain()\n"
    assert "hr.setup(net, opt, held_in)" in write_setup(again, facts_of_functions(again))


def test_functions_that_look_are_left_out() -> None:
    assert write_job("train.py", FUNCTIONS, facts_of_functions(FUNCTIONS)).left_out
