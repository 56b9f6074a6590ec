"""Tables 2 to 4 of Zhang and Chen (2020), ours beside the paper's, and one of ours: what robustness is made of."""

from __future__ import annotations

from statistics import mean
from typing import Any

from reproductions.jobs import Job, Records
from reproductions.seeds import SEEDS, by_seed, paired, spread
from reproductions.study import ResultTable, smoke_note
from reproductions.weight_sampling import attack_sets, paper
from reproductions.weight_sampling.measures import RATES, SIZES, white_box_options
from reproductions.weight_sampling.networks import RUNS
from reproductions.weight_sampling.stages import CONTROL, RHO, TUNED_RHO, all_networks, network_jobs


def table_2(records: Records, scale: str) -> ResultTable:
    """Accuracy of one network on the twelve sets, by set and network."""
    networks = [job for job in network_jobs(scale) if f"sets-{job.name}" in records]
    rows = []
    for name in _set_names(scale):
        rows.append(
            [attack_sets.set_title(name), *(_pair(_one(records, job, name), _printed(job, name)) for job in networks)]
        )
    averages = {job.name: average(records[f"sets-{job.name}"], "1", scale) for job in networks}
    rows.append(["average", *(_pair(averages[job.name], _printed(job, "average")) for job in networks)])
    notes = [_HOW.format(draws=RUNS), *smoke_note(scale), *_gap(averages), *_over_seeds(records, networks, scale)]
    columns = ["made for", *(_title(job.name) for job in networks)]
    return ResultTable("Table 2: accuracy on perturbed data (Zhang and Chen 2020)", columns, rows, notes)


def table_3(records: Records, scale: str) -> ResultTable:
    """Accuracy of ensembles of draws on the twelve sets."""
    record = records[f"sets-{TUNED_RHO}"]
    sizes = [str(size) for size in SIZES]
    rows = []
    for name in [*_set_names(scale), "average"]:
        ours = {n: average(record, n, scale) if name == "average" else record["numbers"][name][n] for n in sizes}
        pairs = zip(sizes, paper.ENSEMBLES[name], strict=True)
        rows.append([_row(name), *(_pair(ours[n], printed) for n, printed in pairs)])
    gain = average(record, sizes[-1], scale) - average(record, sizes[0], scale)
    notes = [
        f"Accuracy in %, in brackets the paper's. ρ = {RHO:g}; networks are averaged by probabilities, and accuracies "
        f"over {RUNS}/N ensembles that share no network.",
        *smoke_note(scale),
        f"{sizes[-1]} networks instead of one: {gain:+.1f} points on average (paper +5.1).",
    ]
    columns = ["made for", *(f"N={size}" for size in sizes)]
    return ResultTable("Table 3: ensembles of draws on perturbed data (Zhang and Chen 2020)", columns, rows, notes)


def table_4(records: Records, scale: str) -> ResultTable:
    """Accuracy of pruned ensembles, on test data and the twelve sets."""
    found = {rate: records[f"pruned-{rate:g}"] for rate in RATES if f"pruned-{rate:g}" in records}
    many = str(max(SIZES))
    rows: list[list[Any]] = []
    for name in ("validation", "test", *_set_names(scale), "average"):
        printed = dict(zip(paper.RATES, paper.PRUNED[name], strict=True))
        ours = {r: average(f, many, scale) if name == "average" else f["numbers"][name][many] for r, f in found.items()}
        rows.append([_row(name), *(_pair(ours[rate], printed.get(rate)) for rate in found)])
    rows.append(["average, one network", *(f"{average(record, '1', scale):.1f}" for record in found.values())])
    rows.append(["file, kB", *(f"{record['file_bytes'] / 1000:.0f}" for record in found.values())])
    notes = [
        f"Accuracy in % of {many} networks averaged, in brackets the paper's. ρ = {RHO:g}; pruned are the weights with "
        "the smallest |mean|/std of all layers together, not the biases; nothing is trained again.",
        *smoke_note(scale),
        *_pruning(found, many, scale),
    ]
    columns = ["made for", *(f"{100 * rate:g} %" for rate in found)]
    return ResultTable("Table 4: pruned networks (Zhang and Chen 2020)", columns, rows, notes)


def white_box_table(records: Records, scale: str) -> ResultTable:
    """Effects of prior, sampling and averaging, and of an attacker who knows the posterior: one row per network."""
    many, options = str(max(SIZES)), white_box_options(scale)
    rows: list[list[Any]] = []
    networks = [job for job in all_networks(scale) if f"white-box-{job.name}" in records]
    for job in networks:
        on_sets, attacked = records[f"sets-{job.name}"], records[f"white-box-{job.name}"]
        printed = None if job.name == CONTROL else _printed(job, "average")
        row: list[Any] = [_title(job.name), f"{on_sets['numbers']['test']['1']:.1f}"]
        row += [_pair(average(on_sets, "1", scale), printed)]
        row += [f"{average(on_sets, key, scale):.1f}" for key in ("mean_weights", many)]
        for size in options["distortions"]:
            row += [f"{attacked['numbers'][f'{size:g}'][n]:.1f}" for n in ("1", many)]
        rows.append([*row, str(len(attacked["masking"]["findings"]))])
    columns = ["network", "clean", "sets", "sets, mean weights", f"sets, {many} draws"]
    for size in options["distortions"]:
        columns += [f"white-box {size:g}", f"{size:g}, {many} draws"]
    notes = [
        f"Accuracy in % of one network (mean of {RUNS}), of the mean weights, and of {many} draws "
        "averaged; sets: average over the twelve, in brackets the paper's.",
        f"white-box: PGD in an L2 ball, {options['steps']} steps, each along the averaged gradient of "
        f"{options['gradient_draws']} fresh draws; radius given as distortion, pixels in [0, 2]; first "
        f"{options['count']} test images; evaluated with draws that the attack did not see.",
        "masking: number of signs of masked gradients (more steps are weaker, random search is stronger, accuracy left "
        "under an unbounded attack, zero gradients).",
        f"{_title(CONTROL)}: no sampling and no prior, but learning rate, initial weights and patience of the Bayesian "
        "rows. ρ=-30: the prior, with almost no noise. literal: the other setting of Table 1.",
        *smoke_note(scale),
        *_parts({job.name: average(records[f"sets-{job.name}"], "1", scale) for job in networks}),
    ]
    return ResultTable("What the robustness is made of", [*columns, "masking"], rows, notes)


_HOW = "Accuracy in % of one sampled network, mean of {draws}, in brackets the paper's. Networks of Table 1, tuned."


_FIRST = "tuned-bayesian--30"


def average(record: dict[str, Any], key: str, scale: str) -> float:
    """Average a record's accuracies over the twelve sets.

    Args:
        record: A record of a measurement on the sets.
        key: Number of networks, or "mean_weights".
        scale: The preset.
    """
    return float(mean(record["numbers"][name][key] for name in _set_names(scale)))


def _set_names(scale: str) -> list[str]:
    return [job.name for job in attack_sets.set_jobs(scale)]


def _one(records: Records, job: Job, name: str) -> float:
    accuracy: float = records[f"sets-{job.name}"]["numbers"][name]["1"]
    return accuracy


def _printed(job: Job, name: str) -> float:
    kind, value = job.arguments["kind"], job.arguments["value"]
    if kind == "bayesian":
        return paper.BAYESIAN[name][paper.RHOS.index(value)]
    return paper.DETERMINISTIC[name][paper.STRENGTHS.index(value)]


def _pair(ours: float, printed: float | None) -> str:
    return f"{ours:.1f} (–)" if printed is None else f"{ours:.1f} ({printed:.1f})"


def _row(name: str) -> str:
    return attack_sets.set_title(name) if name.startswith("fc-") else name


def _title(name: str) -> str:
    if name == CONTROL:
        return "ρ=-30, κ=0"
    setting, kind, value = name.split("-", 2)
    return f"{'ρ' if kind == 'bayesian' else 'λ'}={value}{', literal' if setting == 'literal' else ''}"


def _best(averages: dict[str, float], kind: str) -> str | None:
    return max((name for name in averages if name.startswith(f"tuned-{kind}")), key=averages.__getitem__, default=None)


def _gap(averages: dict[str, float]) -> list[str]:
    """Sentence: the best Bayesian network and the best deterministic one."""
    ours, plain = _best(averages, "bayesian"), _best(averages, "deterministic")
    if ours is None or plain is None:
        return []
    return [
        f"On average over the sets {_title(ours)} is best with {averages[ours]:.1f} %, of the deterministic networks "
        f"{_title(plain)} with {averages[plain]:.1f} %: {averages[ours] - averages[plain]:+.1f} points (paper +15.4)."
    ]


def _over_seeds(records: Records, networks: list[Job], scale: str) -> list[str]:
    """Sentences: averages over the sets of networks with enough seeds, and ρ = −30 minus the others, paired."""
    found = {
        job.name: {seed: average(one, "1", scale) for seed, one in by_seed(records, f"sets-{job.name}").items()}
        for job in networks
    }
    several = {name: of_seeds for name, of_seeds in found.items() if len(of_seeds) == len(SEEDS)}
    told = [f"{_title(name)} {spread([*of_seeds.values()], 1)}" for name, of_seeds in several.items()]
    first = several.pop(_FIRST, {})
    leads = [f"{_title(name)} {lead}" for name, others in several.items() if (lead := paired(first, others, 1))]
    notes = (
        [f"The columns are of seed 0. Average over the sets of {len(SEEDS)} seeds: {', '.join(told)}."] if told else []
    )
    minus = f"{_title(_FIRST)} minus the others, paired by seed, 95 % t intervals"
    return [*notes, f"{minus}: {', '.join(leads)}."] if leads else notes


def _parts(averages: dict[str, float]) -> list[str]:
    """Sentence: how much of the gap is left without sampling, and without the prior."""
    ours, plain, prior = _best(averages, "bayesian"), _best(averages, "deterministic"), _FIRST
    if ours is None or plain is None or prior not in averages or CONTROL not in averages:
        return []
    steps = [
        (plain, "the best deterministic network"),
        (CONTROL, "training as the Bayesian rows"),
        (prior, "the prior"),
    ]
    told = [f"{words} {averages[name]:.1f} %" for name, words in steps]
    return [
        f"From the best deterministic network to the best Bayesian one: {', '.join(told)}, sampling "
        f"{averages[ours]:.1f} %."
    ]


def _pruning(found: dict[float, dict[str, Any]], many: str, scale: str) -> list[str]:
    """Sentences: the loss of accuracy with half of the weights, and the file size with a quarter of them."""
    notes = []
    if 0.0 in found and 0.5 in found:
        lost = [found[0.0]["numbers"]["test"][many] - found[0.5]["numbers"]["test"][many]]
        lost.append(average(found[0.0], many, scale) - average(found[0.5], many, scale))
        notes.append(
            f"Without half of its weights it loses {lost[0]:.2f} points on test data, {lost[1]:.2f} on the sets."
        )
    if 0.75 in found:
        share = found[0.75]["file_bytes"] / found[0.75]["unpruned_bytes"]
        notes.append(f"The file without 75 % of the weights takes {share:.3f} of the unpruned one.")
    return notes
