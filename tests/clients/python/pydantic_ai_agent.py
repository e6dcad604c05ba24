"""Pydantic AI: an agent that calls a tool and then answers with an object; text, streams, responses."""

from typing import Annotated

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks import KEY, MODEL, OBJECT_TOKENS, URL, Closed, Sum, check, expect, run

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(MODEL, provider=PROVIDER)
SETTINGS = {"max_tokens": OBJECT_TOKENS, "temperature": 0}
QUESTION = "What is 12 + 7?"
Number = Annotated[int, pydantic.Field(ge=0, le=99)]


def first_add(context):
    """Settings that force the tool in the first step and the answer in the next."""
    name = "add" if context.run_step == 1 else "final_result"
    return {**SETTINGS, "tool_choice": [name]}


# Small, because the prompt contains its schema and that of the tool.
class Verdict(Closed):
    certain: bool


def agent_with_tool(model):
    """An agent and the list of the calls of its tool."""
    agent, calls = Agent(model, output_type=Verdict, model_settings=first_add), []

    @agent.tool_plain
    def add(a: Number, b: Number) -> int:
        """Adds."""
        calls.append((a, b))
        return a + b

    return agent, calls


@check
def text():
    result = Agent(CHAT, instructions="Answer.", model_settings=SETTINGS).run_sync(QUESTION)
    expect(result.output, f"no text: {result}")


@check
def a_loop_with_a_tool_and_an_object():
    agent, calls = agent_with_tool(CHAT)
    result = agent.run_sync(QUESTION)
    expect(isinstance(result.output, Verdict), f"the output is {result.output!r}")
    expect(len(calls) == 1, f"the calls are {calls}")


@check
async def a_streamed_loop():
    agent, calls = agent_with_tool(CHAT)
    async with agent.run_stream(QUESTION) as stream:
        output = await stream.get_output()
    expect(isinstance(output, Verdict) and len(calls) == 1, f"{output!r} after {calls}")


@check
def an_object_by_its_schema():
    agent = Agent(CHAT, output_type=NativeOutput(Sum), model_settings=SETTINGS)
    result = agent.run_sync(QUESTION)
    expect(isinstance(result.output, Sum), f"the output is {result.output!r}")


@check
def a_loop_over_responses():
    agent, calls = agent_with_tool(RESPONSES)
    result = agent.run_sync(QUESTION)
    expect(isinstance(result.output, Verdict) and len(calls) == 1, f"{result.output!r} after {calls}")


if __name__ == "__main__":
    run()
