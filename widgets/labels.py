"""What the labels of the dashboard and of the status line mean: the sentence of a tooltip, and of the help (F1)."""

from collections.abc import Mapping

LABELS: Mapping[str, Mapping[str, str]] = {
    "status line": {
        "tok/s": "Tokens a second of the reply, without its first token.",
        "first token": "The time from the prompt to the first token of the reply.",
        "tokens": "Context: the tokens of this chat that the model has read and written, of those for which there is "
        "room.",
        "stays warm": "The engine lives on for so long when the program ends, for the next run.",
    },
    "preset": {
        "BEAM": "The width of the search for faster kernels; 0 searches nothing.",
    },
    "throughput": {
        "of roofline": "The speed as a share of the highest that the memory allows; the dotted line.",
        "cached": "Faster than the memory: the weights stay in a cache.",
        "median": "The middle one of the speeds measured since the engine was ready.",
        "best": "The highest of the speeds measured since the engine was ready.",
        "prefill": "Tokens a second of the last prompt that had 32 new tokens or more.",
        "modelled": "The bytes that a step must read, divided by the time that it takes.",
        "copy": "The bandwidth of a copy in the device's memory, the best that was measured.",
        "reading": "The bandwidth of reading the memory, the best that was measured.",
        "busy, measured": "How much of the time the memory controller works, by its own counter.",
        "prf": "The axis of prefill, which is hatched; decode has the left one.",
        "P prompt": "P marks where a prompt begins.",
        "E engine": "E marks where another engine answers from then on.",
        "S search": "S marks where a search for faster kernels has ended.",
    },
    "kernels": {
        "sum": "The time of all kernels of a step, each timed by itself.",
        "wall": "The time of the whole step, as it runs in a reply.",
        "gap": "What the wall time exceeds the sum by: launches and the host.",
        "explains": "The wall time of the step, as a share of a token's time in the last answer.",
        "role": "What part of the model a kernel computes.",
        "calls": "How often the kernel runs in a step.",
        "%": "The kernel's share of the step.",
        "GB/s": "The bytes that it must read and write, divided by its time.",
        "roof": "GB/s as a share of the device's measured bandwidth; cached where only a cache is so fast.",
        "dequantize + matmul": "The products with weights, which they decode as they read them.",
        "attention": "The kernels that read the KV cache, or the state of a delta net.",
        "norm, element-wise": "Norms, sums, embeddings and copies.",
        "sampling": "The kernels that draw the next token.",
        "launch gaps": "The time of a step in which no kernel runs.",
        "other": "The groups below 1.5 % of the step, together.",
    },
    "experts": {
        "most chosen": "The share of a layer's tokens that its most chosen expert computed, in the last minute.",
        "never": "Experts, of all layers, that were not chosen in the last minute; a dot each.",
    },
    "machine": {
        "CPU load": "How busy the CPU is, by all programs.",
        "other load": "How busy other programs keep the CPU; with F9, which ones they are.",
        "busiest core": "The load of the busiest core; with F9, that of each.",
        "CPU clock": "The mean clock of the cores, and the highest that they can have.",
        "memory": "The memory that is in use, by all programs, of what there is.",
        "engine memory": "What the engine's processes hold of the memory, the files that they map included.",
        "temperature": "The highest temperature of the device.",
        "GPU load": "How much of the time the GPU computes anything.",
        "GPU clock": "The clock of the GPU, and the highest that it can have.",
        "GPU memory": "The memory of the GPU that is in use, by all programs; with F9, by which.",
        "memory activity": "How much of the time the memory of the GPU is read or written.",
        "memory clock": "The clock of the GPU's memory, and the highest that it can have.",
        "EMC activity": "How much of the time the memory controller works.",
        "EMC clock": "The clock of the memory controller, and the highest that it can have.",
        "power": "The power that is drawn, and the limit.",
        "power mode": "The mode of nvpmodel, which limits clocks and cores.",
        "tokens a joule": "The tokens of the reply that a joule of this power gives.",
        "jetson_clocks": "Whether the clocks are held at their highest.",
        "throttled": "Whether the clocks are lowered, and why.",
    },
}  # fmt: skip
"""By pane, then by label."""


def label_at(line: str, x: int, labels: Mapping[str, str]) -> str:
    """The sentence on the label that a cell of a line belongs to, the longest one; "" if it is none."""
    for label in sorted(labels, key=len, reverse=True):
        at = -1
        while (at := line.find(label, at + 1)) >= 0:
            before, after = line[at - 1 : at] if at else "", line[at + len(label) : at + len(label) + 1]
            is_whole = not (before.isalnum() and label[0].isalnum()) and not (
                after.isalnum() and label[-1].isalnum()
            )
            if is_whole and at <= x < at + len(label):
                return f"{label}: {labels[label]}"
    return ""
