"""A sample of the wrong command lines; `python -m tests.faults mistakes` runs all of them."""

from tests.faults.mistakes import attempt, run, table, workshop


def test_the_table_is_long_and_reaches_every_command() -> None:
    from deepenough.cli import commands

    lines = table()
    assert len(set(lines)) == len(lines) >= 300
    missing = [name for name in commands() if not any(line.startswith(name) for line in lines)]
    assert missing == []


def test_mistakes_are_refused_with_a_sentence_that_says_what_to_do() -> None:
    outcomes = run(seed=0, share=0.3)
    assert len(outcomes) > 90
    wrong = [each for each in outcomes if each.wrong]
    assert wrong == []


def test_what_is_no_mistake_would_be_noticed() -> None:
    with workshop() as places:
        right = attempt("par generate {par} --tokens 2", places)
        chatty = attempt("par", places)
        leaving = attempt("par plot {par} --out {out}", places)
    assert "exit code 0" in right.wrong and "no remedy" in chatty.wrong
    assert any(each.startswith("changed") for each in leaving.wrong)
