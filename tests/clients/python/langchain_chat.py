"""LangChain's ChatOpenAI: messages, streams, tools, objects, and responses."""

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field

from checks import KEY, MODEL, OBJECT_TOKENS, TIMEOUT, URL, Closed, Sum, check, expect, raised, run

OPTIONS = {
    "model": MODEL,
    "base_url": f"{URL}/v1",
    "api_key": KEY,
    "timeout": TIMEOUT,
    "max_retries": 0,
    "temperature": 0,
}
CHAT = ChatOpenAI(max_tokens=40, **OPTIONS)
LONG = ChatOpenAI(max_tokens=OBJECT_TOKENS, **OPTIONS)
QUESTION = HumanMessage("What is 12 + 7?")


class Operands(Closed):
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


@tool(args_schema=Operands)
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@check
def messages_and_usage():
    answer = CHAT.invoke([SystemMessage("Answer."), QUESTION])
    expect(answer.content, f"no text: {answer}")
    expect(answer.usage_metadata["total_tokens"] > 0, f"usage {answer.usage_metadata}")
    expect(answer.response_metadata["finish_reason"] in ("stop", "length"), f"{answer}")


@check
def a_stream_has_the_same_text():
    whole = CHAT.invoke([QUESTION])
    parts = list(CHAT.stream([QUESTION], stream_usage=True))
    text = "".join(part.content for part in parts)
    expect(text == whole.content, f"streamed {text!r}, whole {whole.content!r}")
    usage = [part.usage_metadata for part in parts if part.usage_metadata]
    expect(usage and usage[-1]["output_tokens"] > 0, f"usage {usage}")


@check
async def batches():
    answers = await CHAT.abatch([[QUESTION], "What is 1 + 1?", [QUESTION]])
    expect(answers[0].content == answers[2].content, f"{answers}")


@check
def a_loop_with_tools():
    for choice in ("add", "required"):
        forced = LONG.bind_tools(
            [add], tool_choice=choice, strict=True, parallel_tool_calls=False
        )
        messages = [QUESTION, forced.invoke([QUESTION])]
        [call] = messages[1].tool_calls
        result = add.invoke(call)
        expect(isinstance(result, ToolMessage), f"the result is {result!r}")
        arguments = call["args"]
        expect(result.content == str(arguments["a"] + arguments["b"]), f"{call}, {result}")
        for choice in ("none", "auto"):
            answer = LONG.bind_tools([add], tool_choice=choice).invoke([*messages, result])
            expect(answer.content and not answer.tool_calls, f"the answer is {answer}")


@check
def streamed_calls():
    forced = LONG.bind_tools([add], tool_choice="add", strict=True)
    [whole] = forced.invoke([QUESTION]).tool_calls
    message = None
    for part in forced.stream([QUESTION]):
        message = part if message is None else message + part
    [call] = message.tool_calls
    expect(call["args"] == whole["args"], f"streamed {call}, whole {whole}")


@check
def objects():
    for method, strict in (
        ("json_schema", None),
        ("json_schema", True),
        ("function_calling", True),
    ):
        options = {"method": method, **({"strict": strict} if strict else {})}
        answer = LONG.with_structured_output(Sum, **options).invoke([QUESTION])
        expect(isinstance(answer, Sum), f"{answer!r} with {options}")


@check
def responses():
    chat = ChatOpenAI(max_tokens=40, use_responses_api=True, **OPTIONS)
    answer = chat.invoke([SystemMessage("Answer."), QUESTION])
    expect(answer.text, f"no text: {answer}")
    text = "".join(part.text for part in chat.stream([SystemMessage("Answer."), QUESTION]))
    expect(text == answer.text, f"streamed {text!r}, whole {answer.text!r}")
    long = ChatOpenAI(max_tokens=OBJECT_TOKENS, use_responses_api=True, **OPTIONS)
    message = long.bind_tools([add], tool_choice="add", strict=True).invoke([QUESTION])
    turns = [QUESTION, message, add.invoke(message.tool_calls[0])]
    answer = long.bind_tools([add], tool_choice="none").invoke(turns)
    expect(answer.text, f"no text after the result: {answer}")


@check
def a_prompt_that_is_too_long():
    raised(ContextOverflowError, lambda: CHAT.invoke("1 " * 3000))


if __name__ == "__main__":
    run()
