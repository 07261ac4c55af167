# /// script
# [tool.marimo.display]
# theme = "system"
# ///
"""Where the bytes of training are: a notebook with knobs. ``shardbook explore`` serves it; ``python app.py`` runs it as it stands.

What it computes is in the modules beside it, which know nothing of marimo.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="shardbook: where the bytes are")


@app.cell
def _():
    import marimo as mo

    from shardbook import errors
    from shardbook.explore import cases, knobs, measured, pictures, runs, settings, small, stacks, style
    from shardbook.explore import words as lesson
    from shardbook.facts import hardware

    return errors, cases, hardware, knobs, lesson, measured, mo, pictures, runs, settings, small, stacks, style


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
    _names = zip(settings.TERMS, ("parameters", "gradients", "master", "moments"), strict=True)
    term = mo.ui.dictionary({name: mo.ui.text(label=words, placeholder="the convention's") for name, words in _names})
    budget = mo.ui.dictionary({name: mo.ui.text(label=name, placeholder="20GiB") for name in settings.BUDGETS})
    return budget, convention, count, device, engine, micro_batch, model, precision, ranks, recompute, sequence, stage, term


@app.cell
def _(budget, convention, count, device, engine, lesson, micro_batch, mo, model, precision, ranks, recompute, sequence, stage, term):
    def _row(*controls):
        return mo.hstack(controls, justify="start", align="center", gap=1.4, wrap=True)

    mo.vstack(
        [
            _row(model, count),
            _row(ranks, stage, engine, precision),
            _row(sequence, micro_batch, recompute, device),
            mo.md(lesson.CONVENTION),
            _row(convention, *term.elements.values()),
            mo.md(lesson.BUDGETS),
            _row(*budget.elements.values()),
        ],
        gap=0.7,
    )
    return


@app.cell
def _(
    errors, budget, convention, count, device, engine, knobs, micro_batch, mo, model, precision, ranks, recompute, sequence, settings,
    stage, style, term,
):  # fmt: skip
    setting, told = None, None
    try:
        _wanted = settings.Settings(
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
            **knobs.terms(term.value),
            **knobs.budgets(budget.value),
        )
        setting, _said = settings.settled(_wanted)
        told = settings.answer(setting)
    except errors.ConfigError as _error:
        _said = (settings.one_line(_error),)
    mo.Html(style.page('<div id="said" role="status">', *(style.line(_words, "bad") for _words in _said), "</div>"))
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
def _(convention, lesson, mo, model, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.WEIGHTS),
            mo.hstack([model, convention], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="weights">{lesson.weights_and_state(told)}</div>')),
        ]
    )
    return


@app.cell
def _(mo):
    outcomes = {}
    get_run, set_run = mo.state(None)
    run_weights = mo.ui.run_button(label="run: one rank, real")
    run_stage = mo.ui.run_button(label="run: two ranks under this stage, real")
    run_recompute = mo.ui.run_button(label="run: without and with recomputation, real")
    run_traffic = mo.ui.run_button(label="run: stages 1 and 3, real")
    run_divide = mo.ui.run_button(label="run: 1, 2 and 8 ranks, real")
    return get_run, outcomes, run_divide, run_recompute, run_stage, run_traffic, run_weights, set_run


@app.cell
def _(errors, lesson, mo, outcomes, runs, set_run, settings, style, told):
    def live(button, name, *commands):
        """The button, and what its commands last printed. ``commands`` are made when it is pressed, as each makes a folder."""
        if button.value:
            with mo.status.spinner(title="running on this machine; the knobs wait until it is done"):
                try:
                    outcomes[name] = [runs.perform(make()) for make in commands]
                except errors.ConfigError as error:
                    outcomes[name] = [runs.Outcome(typed="", text=settings.one_line(error), ended_well=False, seconds=0.0)]
            for one in outcomes[name]:
                if one.document is not None:
                    set_run(one.document)
        found = outcomes.get(name, [])
        shown = [part for one in found for part in (style.outcome(one), lesson.laid_over(one.document, told))]
        return mo.vstack([button, mo.Html(style.page(f'<div id="run-{name}">', *shown, "</div>"))])

    return (live,)


@app.cell
def _(live, run_weights, runs, small):
    live(run_weights, "weights", lambda: runs.train(small.Small(ranks=1, stage=0)))
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
def _(cases, lesson, mo, setting, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md("#### State against the number of ranks"),
            mo.Html(style.page(f'<div id="by-ranks">{lesson.state_picture(cases.bare(setting), told.inputs.get("device_memory"))}</div>')),
        ]
    )
    return


@app.cell
def _(live, run_stage, runs, setting, small):
    live(run_stage, "stage", lambda: runs.train(small.Small(stage=setting.stage if setting else 3)))
    return


@app.cell
def _(cases, lesson, micro_batch, mo, recompute, sequence, setting, stacks, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.CHECKPOINTING),
            mo.hstack([recompute, micro_batch, sequence], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="recompute">{stacks.of_cases(cases.recomputations(setting))}</div>')),
        ]
    )
    return


@app.cell
def _(live, run_recompute, runs):
    live(run_recompute, "recompute", lambda: runs.recomputing("none"), lambda: runs.recomputing("full"))
    return


@app.cell
def _(cases, engine, lesson, mo, pictures, ranks, setting, style, told):
    mo.stop(told is None)
    mo.vstack(
        [
            mo.md(lesson.THROUGHPUT),
            mo.hstack([ranks, engine], justify="start", gap=1.4, wrap=True),
            mo.Html(style.page(f'<div id="traffic">{pictures.saved_and_sent(cases.persistent_stages(setting))}</div>')),
        ]
    )
    return


@app.cell
def _(live, run_traffic, runs, small):
    live(run_traffic, "traffic", lambda: runs.train(small.Small(stage=1)), lambda: runs.train(small.Small(stage=3)))
    return


@app.cell
def _(cases, lesson, micro_batch, mo, setting, stacks, style, told):
    mo.stop(told is None)
    _cases = cases.one_and_eight(setting)
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
    live(run_divide, "divide", runs.does_the_peak_divide)
    return


@app.cell
def _(lesson, mo):
    path = mo.ui.text(value=mo.cli_args().get("run") or "", label="run.json", placeholder="runs/train/run.json", full_width=True)
    mo.vstack([mo.md(lesson.MEASURED), path])
    return (path,)


@app.cell
def _(errors, get_run, knobs, lesson, measured, mo, path, settings, style, told):
    try:
        _run = measured.read(knobs.as_path(path.value)) if path.value.strip() else get_run()
        _parts = lesson.compared(_run, told) if _run is not None else [style.line(lesson.NO_RUN, "soft")]
    except errors.ConfigError as _error:
        _parts = [style.line(settings.one_line(_error), "bad")]
    mo.Html(style.page('<div id="measured">', *_parts, "</div>"))
    return


if __name__ == "__main__":
    app.run()
