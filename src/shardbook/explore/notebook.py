# /// script
# [tool.marimo.display]
# theme = "system"
# ///
"""Where the bytes of training are: a notebook with knobs. ``shardbook explore`` serves it; ``python app.py`` runs it as it stands.

What it computes is in the modules beside it, which know nothing of marimo.
"""

import marimo

app = marimo.App(width="medium", app_title="shardbook: where the bytes are")


@app.cell
def _():
    import marimo as mo

    from shardbook.errors import ConfigError
    from shardbook.explore import jobs as runs
    from shardbook.explore import measured, pictures, settings, stacks, style
    from shardbook.explore import words as lesson
    from shardbook.facts import hardware

    return ConfigError, hardware, lesson, measured, mo, pictures, runs, settings, stacks, style


@app.cell
def _(mo, style):
    mo.Html(style.STYLE)
    return


@app.cell
def _(lesson, mo):
    mo.md(lesson.OPENING)
    return


@app.cell
def _(hardware, mo, settings):
    usual = settings.Settings()
    model = mo.ui.dropdown(options=list(settings.models()), value=usual.model, label="model")
    count = mo.ui.text(label="or parameters, or a config.json", placeholder="7e9")
    ranks = mo.ui.slider(steps=[2**power for power in range(15)], value=usual.ranks, label="ranks", show_value=True)
    stage = mo.ui.radio(options=["0", "1", "2", "3"], value=str(usual.stage), inline=True, label="stage")
    engine = mo.ui.dropdown(options=list(settings.ENGINES), value=usual.engine, label="engine")
    precision = mo.ui.dropdown(options=list(settings.PRECISIONS), value=usual.precision, label="precision")
    sequence = mo.ui.slider(steps=[2**power for power in range(7, 18)], value=usual.sequence, label="sequence", show_value=True)
    micro_batch = mo.ui.slider(steps=[0, 1, 2, 4, 8, 16, 32, 64], value=usual.micro_batch, label="micro-batch", show_value=True)
    recompute = mo.ui.dropdown(options=list(settings.RECOMPUTE), value=usual.recompute, label="recomputation")
    device = mo.ui.dropdown(options=["none", *hardware.names()], value=usual.device, label="device")
    convention = mo.ui.dropdown(options=["the engine's own", *settings.conventions()], value="the engine's own", label="convention")
    terms = {
        name: mo.ui.number(start=0, stop=64, step=0.5, value=None, label=words)
        for name, words in zip(settings.TERMS, ("parameters", "gradients", "master", "moments"), strict=True)
    }
    budgets = {name: mo.ui.number(start=0, stop=1e6, step=1, value=None, label=f"{name}, GiB") for name in settings.BUDGETS}
    knob = mo.ui.dictionary(terms)
    budget = mo.ui.dictionary(budgets)
    return budget, convention, count, device, engine, knob, micro_batch, model, precision, ranks, recompute, sequence, stage


@app.cell
def _(budget, convention, count, device, engine, knob, lesson, micro_batch, mo, model, precision, ranks, recompute, sequence, stage):
    def _row(*controls):
        return mo.hstack(controls, justify="start", align="center", gap=1.4, wrap=True)

    mo.vstack(
        [
            _row(model, count),
            _row(ranks, stage, engine, precision),
            _row(sequence, micro_batch, recompute, device),
            mo.md(lesson.CONVENTION),
            _row(convention, *knob.elements.values()),
            mo.md(lesson.BUDGETS),
            _row(*budget.elements.values()),
        ],
        gap=0.7,
    )
    return


@app.cell
def _(budget, convention, count, device, engine, knob, micro_batch, model, precision, ranks, recompute, sequence, settings, stage):
    wanted = settings.Settings(
        model=count.value.strip() or model.value,
        ranks=ranks.value,
        stage=int(stage.value),
        engine=engine.value,
        precision=precision.value,
        convention="" if convention.value == "the engine's own" else convention.value,
        micro_batch=micro_batch.value or None,
        sequence=sequence.value if micro_batch.value else None,
        recompute=recompute.value,
        device="" if device.value == "none" else device.value,
        **knob.value,
        **budget.value,
    )
    return (wanted,)


@app.cell
def _(ConfigError, mo, settings, style, wanted):
    try:
        setting, _moved = settings.settled(wanted)
        told = settings.answer(setting)
    except ConfigError as _error:
        setting, told = None, None
        mo.output.replace(mo.Html(style.page(style.line(settings.one_line(_error), "bad"))))
    else:
        mo.output.replace(mo.Html(style.page(*(style.line(_words, "bad") for _words in _moved))))
    return setting, told


@app.cell
def _(lesson, mo, pictures, setting, stacks, style, told):
    mo.stop(told is None)
    mo.Html(
        style.page(
            '<div id="one-rank">',
            stacks.of_forecast(told),
            style.line(lesson.verdict(told), "verdict"),
            pictures.cards(told),
            style.line(told.convention.describe(), "soft"),
            "</div>",
            style.command(setting.command_line),
        )
    )
    return


@app.cell
def _(mo, pictures, style, told):
    mo.stop(told is None)
    mo.vstack([mo.md("### The moving bottleneck"), mo.Html(style.page(f'<div id="bottleneck">{pictures.moving_bottleneck(told)}</div>'))])
    return


@app.cell
def _(convention, lesson, mo, model, stacks, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.WEIGHTS),
            mo.hstack([model, convention], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="weights">{lesson.weights_and_state(told, stacks.draw)}</div>')),
        ]
    )
    return


@app.cell
def _(mo):
    outcomes = {}
    get_path, set_path = mo.state(mo.cli_args().get("run") or "")
    run_weights = mo.ui.run_button(label="run: one rank, real")
    run_stage = mo.ui.run_button(label="run: two ranks under this stage, real")
    run_plain = mo.ui.run_button(label="run: without recomputation")
    run_recomputed = mo.ui.run_button(label="run: with recomputation")
    run_traffic = mo.ui.run_button(label="run: stages 1 and 3, compared")
    run_divide = mo.ui.run_button(label="run: 1, 2 and 8 ranks")
    return get_path, outcomes, run_divide, run_plain, run_recomputed, run_stage, run_traffic, run_weights, set_path


@app.cell
def _(mo, outcomes, runs, set_path, style):
    def live(button, name, job):
        """The button, the command, and what the command last printed."""
        if button.value:
            with mo.status.spinner(title="running on this machine; knobs wait until it is done"):
                outcomes[name] = runs.run(job)
            if outcomes[name].document is not None:
                set_path(str(outcomes[name].document))
        return mo.vstack([button, mo.Html(style.page(style.command(job.typed()), style.outcome(outcomes.get(name))))])

    return (live,)


@app.cell
def _(live, run_weights, runs):
    live(run_weights, "weights", runs.training(0, ranks=1))
    return


@app.cell
def _(lesson, mo, pictures, ranks, setting, settings, stacks, stage, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.STAGES),
            mo.hstack([stage, ranks], justify="start", gap=1.4, wrap=True),
            mo.Html(
                style.page(
                    f'<div id="stages">{stacks.of_cases(settings.stages(setting))}</div>',
                    f'<div id="residence">{pictures.residence(told)}</div>',
                )
            ),
        ]
    )
    return


@app.cell
def _(mo, pictures, setting, settings, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md("#### State against the number of ranks"),
            mo.Html(
                style.page(
                    f'<div id="by-ranks">{pictures.by_ranks(settings.state_by_ranks(setting), told.inputs.get("device_memory"))}</div>'
                )
            ),
        ]
    )
    return


@app.cell
def _(live, run_stage, runs, setting):
    live(run_stage, "stage", runs.training(setting.stage if setting else 3))
    return


@app.cell
def _(lesson, micro_batch, mo, recompute, sequence, setting, settings, stacks, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.CHECKPOINTING),
            mo.hstack([recompute, micro_batch, sequence], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="recompute">{stacks.of_cases(settings.recomputations(setting))}</div>')),
        ]
    )
    return


@app.cell
def _(live, mo, run_plain, run_recomputed, runs):
    mo.vstack(
        [
            live(run_plain, "plain", runs.checkpointing(recompute=False)),
            live(run_recomputed, "recomputed", runs.checkpointing(recompute=True)),
        ]
    )
    return


@app.cell
def _(engine, lesson, mo, pictures, ranks, setting, settings, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.THROUGHPUT),
            mo.hstack([ranks, engine], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="traffic">{pictures.saved_and_sent(settings.persistent_stages(setting))}</div>')),
        ]
    )
    return


@app.cell
def _(live, run_traffic, runs):
    live(run_traffic, "traffic", runs.traffic())
    return


@app.cell
def _(lesson, micro_batch, mo, setting, settings, stacks, style, told):
    mo.stop(told is None)
    _cases = settings.one_and_eight(setting)
    mo.vstack(
        [
            mo.md(lesson.DIVIDE),
            mo.hstack([micro_batch], justify="start"),
            mo.Html(style.page(f'<div id="divide">{stacks.of_cases(_cases)}{style.line(lesson.divided(_cases))}</div>')),
        ]
    )
    return


@app.cell
def _(live, run_divide, runs):
    live(run_divide, "divide", runs.divide())
    return


@app.cell
def _(get_path, lesson, mo):
    path = mo.ui.text(value=get_path(), label="run.json", placeholder="runs/train/run.json", full_width=True)
    mo.vstack([mo.md(lesson.MEASURED), path])
    return (path,)


@app.cell
def _(ConfigError, measured, mo, path, pictures, settings, stacks, style, told):
    mo.stop(not path.value.strip())
    try:
        _run = measured.read(path.value.strip())
    except ConfigError as _error:
        _parts = [style.line(settings.one_line(_error), "bad")]
    else:
        _parts = measured.laid_over(_run, told, stacks.draw, pictures.differences)
    mo.Html(style.page('<div id="measured">', *_parts, "</div>"))
    return


if __name__ == "__main__":
    app.run()
