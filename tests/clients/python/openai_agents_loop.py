"""OpenAI's agents: loops with a tool over chat completions and over responses, whole and streamed."""

from typing import Annotated

import agents
import openai
import pydantic

from checks import KEY, MODEL, OBJECT_TOKENS, TIMEOUT, URL, Sum, check, expect, run

CLIENT = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=TIMEOUT, max_retries=0)
CHAT = agents.OpenAIChatCompletionsModel(MODEL, openai_client=CLIENT)
RESPONSES = agents.OpenAIResponsesModel(MODEL, openai_client=CLIENT)
QUESTION = "What is 12 + 7?"
Number = Annotated[int, pydantic.Field(ge=0, le=99)]

agents.set_tracing_disabled(True)


def agent_with_tool(model):
    """An agent whose first turn must call its tool, and the list of the calls."""
    calls = []

    @agents.function_tool
    def add(a: Number, b: Number) -> int:
        """Adds."""
        calls.append((a, b))
        return a + b

    # After a call the choice is reset, so that the next turn may answer.
    settings = agents.ModelSettings(
        tool_choice="required", temperature=0, max_tokens=OBJECT_TOKENS, parallel_tool_calls=False
    )
    agent = agents.Agent(
        name="adder", instructions="Answer.", model=model, tools=[add], model_settings=settings
    )
    return agent, calls


async def check_loop(model):
    agent, calls = agent_with_tool(model)
    whole = await agents.Runner.run(agent, QUESTION, max_turns=3)
    expect(whole.final_output and len(calls) == 1, f"{whole.final_output!r} after {calls}")
    streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
    kinds = {event.type async for event in streamed.stream_events()}
    expect("run_item_stream_event" in kinds, f"the events are {kinds}")
    expect(streamed.final_output == whole.final_output, f"streamed {streamed.final_output!r}")
    expect(calls[0] == calls[1], f"the calls are {calls}")


@check
async def a_loop_over_chat_completions():
    await check_loop(CHAT)


@check
async def a_loop_over_responses():
    await check_loop(RESPONSES)


@check
async def an_object():
    settings = agents.ModelSettings(temperature=0, max_tokens=OBJECT_TOKENS)
    for model in (CHAT, RESPONSES):
        agent = agents.Agent(
            name="adder", model=model, output_type=Sum, model_settings=settings
        )
        result = await agents.Runner.run(agent, QUESTION, max_turns=1)
        expect(isinstance(result.final_output, Sum), f"the output is {result.final_output!r}")


if __name__ == "__main__":
    run()
