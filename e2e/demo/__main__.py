"""``make demo``: the main job of Moonpool, done in front of the user on a real cluster."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
from moonpool_worker.weights.resolve import packaged_smollm2
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from e2e.cluster import ensure_cluster
from e2e.cluster.errors import ClusterError
from e2e.demo.story import Story
from e2e.fleet import Fleet, KubectlError, NotReached, install_operator
from e2e.prompts import CHATS
from e2e.rollout_watch import follow, rollout_complete
from e2e.traffic import Answer, Traffic, chat, summarize
from images.builder import build_and_load

FOLDER = Path(__file__).parent
NAMESPACE = "moonpool-demo"


def body(question: int) -> dict:
    return {"model": "smollm2", "messages": CHATS[question], "max_tokens": 32, "temperature": 0}


async def ask(url: str, question: int, stream: bool = False) -> Answer:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answer = await chat(client, body(question), stream)
    if answer.failed:
        raise NotReached(f"the chat failed: {answer.error}")
    return answer


def show(story: Story, answer: Answer) -> None:
    story.say(f"[bold]{escape(answer.text.strip())}[/]")
    story.say(
        f"[dim]{answer.prompt_tokens} prompt tokens, from cache: L1 {answer.l1_tokens}, L2 {answer.l2_tokens}, "
        f"L3 {answer.l3_tokens}; {answer.seconds:.2f} s by {answer.worker or 'a worker'}[/]"
    )


def prepare(story: Story) -> Fleet:
    story.step("A cluster, the images, the operator")
    cluster = ensure_cluster()
    build_and_load(cluster)
    fleet = Fleet(cluster, NAMESPACE)
    fleet.delete_namespace()
    install_operator(cluster)
    fleet.create_namespace()
    fleet.create_weights_volume(packaged_smollm2())
    story.say(f"operator running; weights in PersistentVolumeClaim {NAMESPACE}/weights")
    return fleet


def apply(story: Story, fleet: Fleet) -> None:
    story.step("Two custom resources")
    story.kubectl(fleet, "apply", "-f", "e2e/demo/kvstore.yaml", "-f", "e2e/demo/inferenceservice.yaml")
    story.say("waiting for Ready: workers load the model, report their KV namespace, are verified and granted a tenant")
    fleet.wait_condition("Ready", timeout=420)
    fleet.wait_condition("CacheReady", timeout=120)
    story.kubectl(fleet, "get", "inferenceservices,kvstores")


async def chats(story: Story, fleet: Fleet, url: str) -> list[Answer]:
    story.step("A chat, and the same chat again")
    first = await ask(url, 0)
    show(story, first)
    second = await ask(url, 0, stream=True)
    show(story, second)

    story.step("The worker that answered is deleted; another one answers from L3")
    host = first.worker.removeprefix("http://").split(":")[0]
    pod = next((p for p in fleet.workers() if p["status"].get("podIP") == host), fleet.workers()[0])
    # The blocks go to the store in the background: give the last ones a moment.
    await asyncio.sleep(2)
    story.kubectl(fleet, "delete", "pod", pod["metadata"]["name"], "--wait=true")
    third = await ask(url, 0)
    show(story, third)
    if third.l3_tokens == 0:
        raise NotReached(f"no token came from L3\n{fleet.describe()}")
    if third.text != first.text:
        raise NotReached(f"the answer from L3 differs: {third.text!r} instead of {first.text!r}")
    fleet.wait_condition("WorkersReady", timeout=180)
    return [first, second, third]


async def edit(story: Story, fleet: Fleet, url: str) -> tuple[list[Answer], dict]:
    story.step("The weight version is edited, while requests run")
    traffic = Traffic(url, CHATS, "smollm2", concurrency=2, max_tokens=16)
    await asyncio.sleep(5)
    patch = '{"spec":{"weightVersion":"v2"}}'
    await asyncio.to_thread(story.kubectl, fleet, "patch", "inferenceservice", "chat", "--type=merge", "-p", patch)

    def tell(text: str) -> None:
        now = summarize(traffic.answers)
        story.say(f"{escape(text)}  [dim]· {now.sent} requests, {now.failed} failed[/]")

    try:
        service = await follow(fleet, rollout_complete("v2"), tell, timeout=600)
        await asyncio.sleep(3)
    finally:
        answers = await traffic.stop()
    story.kubectl(
        fleet, "get", "events", "--sort-by=.lastTimestamp", "--field-selector=involvedObject.name=chat", limit=25
    )
    return answers, service


def table(answers: list[Answer], service: dict) -> tuple[Table, list[str]]:
    """The closing table, and what in it is not as it must be."""
    summary = summarize(answers)
    old = next((n for n in service["status"]["kvNamespaces"] if n["state"] == "Flushed"), {})
    proof = old.get("proof") or {}
    removed, evicted, before = (proof.get(k, 0) for k in ("bytesRemoved", "bytesEvicted", "bytesBefore"))
    rows = Table(title="What happened", show_header=False, title_justify="left")
    rows.add_row("requests sent", str(summary.sent))
    rows.add_row("failed", str(summary.failed))
    rows.add_row("cached tokens L1 / L2 / L3", f"{summary.l1_tokens} / {summary.l2_tokens} / {summary.l3_tokens}")
    rows.add_row("old KV namespace", f"{old.get('hash', 'none')[:16]}… (weights {old.get('weightVersion', '?')})")
    rows.add_row(
        "objects / bytes flushed",
        f"{proof.get('objectsRemoved', 0)} removed of {proof.get('objectsBefore', 0)} / {before:,}",
    )
    rows.add_row("bytes before = evicted + removed", f"{before:,} = {evicted:,} + {removed:,}")
    rows.add_row(
        "the store's proof",
        f"DELETE tenant → HTTP {proof.get('deleteStatus')} {proof.get('deleteAnswer', '')} "
        f"after {proof.get('seconds', 0):.1f} s",
    )
    wrong = []
    if summary.failed:
        wrong.append(f"{summary.failed} requests failed: {summary.errors}")
    if not summary.l3_tokens:
        wrong.append("no token came from L3")
    if not before or before != evicted + removed:
        wrong.append(f"the flush's sum is wrong: {before} is not {evicted} + {removed}")
    if proof.get("deleteStatus") not in (200, 204):
        wrong.append("the store did not confirm that the old tenant is empty and gone")
    return rows, wrong


def farewell(story: Story, fleet: Fleet) -> None:
    kubectl = f"{fleet.cluster.kubectl} --kubeconfig {fleet.cluster.kubeconfig} -n {NAMESPACE}"
    story.console.print("\n[bold]Go on:[/]")
    for line in (
        f"alias k='{kubectl}'",
        "k get inferenceservices,kvstores,pods",
        "k describe inferenceservice chat",
        "k port-forward service/chat-gateway 8080:8080 &",
        "curl -s localhost:8080/v1/chat/completions -H 'content-type: application/json' "
        """-d '{"model":"smollm2","messages":[{"role":"user","content":"Hello!"}],"max_tokens":32}'""",
        """k patch inferenceservice chat --type=merge -p '{"spec":{"weightVersion":"v3"}}'""",
        "make down",
    ):
        story.console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


async def tell_story(story: Story) -> int:
    fleet = prepare(story)
    apply(story, fleet)
    with fleet.gateway() as url:
        answers = await chats(story, fleet, url)
        more, service = await edit(story, fleet, url)
    rows, wrong = table(answers + more, service)
    story.console.print()
    story.console.print(rows)
    farewell(story, fleet)
    for fault in wrong:
        story.console.print(f"[bold red]not as it must be: {escape(fault)}[/]")
    return 1 if wrong else 0


def main() -> int:
    # Into a file or a pipe: long lines stay whole.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    story = Story(console)
    try:
        return asyncio.run(tell_story(story))
    except ClusterError as fault:
        console.print(f"[red]{escape(str(fault))}[/]")
        return 3
    except (KubectlError, NotReached) as fault:
        console.print(f"[red]{escape(str(fault))}[/]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; `make down` takes the cluster away")
        return 130


if __name__ == "__main__":
    sys.exit(main())
