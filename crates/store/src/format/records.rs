//! The current stored forms of each record.
//!
//! These types mirror `hone_core::types`. postcard stores no field names, so a field that is added,
//! removed or reordered there would silently change the format. The conversions here are
//! exhaustive: such a change does not compile until there is a decision on how to read existing files.
//! The order of fields and variants in this file is the format; `tests/fixtures` holds files in it. An
//! enum may get further variants at its end. A struct that changes gets a new version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use hone_core::types::{
    ChatOptions, ClientEndpoint, Continuation, FinishReason, GrammarSpec, Group, GroupState,
    Interaction, Message, PolicyCheck, PolicyRecord, PolicyState, PromptSource, ResponseOptions,
    Reward, RewardSource, Role, Sample, SampleOrigin, SamplingParams, StepRecord, TokenSpan, Tool,
    ToolCall, ToolChoice,
};

use super::stored::{StoredForm, mirror_enum, mirror_struct};

mirror_enum!(RoleV1 = Role { System, Developer, User, Assistant, Tool });
mirror_enum!(FinishReasonV1 = FinishReason { Stop, Length, Cancelled });
mirror_enum!(PromptSourceV1 = PromptSource { Live, Dataset });
mirror_enum!(SampleOriginV1 = SampleOrigin { Served, Shadow, Correction });
mirror_enum!(RewardSourceV1 = RewardSource { Grader, Feedback });
mirror_enum!(
    PolicyStateV1 = PolicyState { Candidate, Active, Retired, Rejected, Canary, RolledBack }
);

mirror_struct!(ToolCallV1 = ToolCall { id: String, name: String, arguments: String });

mirror_struct!(
    MessageV1 = Message {
        role: RoleV1,
        content: String,
        name: Option<String>,
        reasoning: Option<String>,
        tool_calls: Vec<ToolCallV1>,
        tool_call_id: Option<String>,
    }
);

mirror_struct!(
    ToolV1 = Tool {
        name: String,
        description: Option<String>,
        parameters: Option<String>,
        strict: bool,
    }
);

mirror_enum!(ToolChoiceV1 = ToolChoice { None, Auto, Required, Function(name: String) });

mirror_struct!(
    ChatOptionsV1 = ChatOptions {
        tools: Vec<ToolV1>,
        tool_choice: ToolChoiceV1,
        parallel_tool_calls: bool,
        template_variables: String,
    }
);

mirror_struct!(
    SamplingParamsV1 = SamplingParams {
        temperature: f32,
        top_p: f32,
        top_k: u32,
        min_p: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        logit_bias: BTreeMap<u32, f32>,
        seed: u64,
        max_tokens: u32,
        repetition_penalty: f32,
        min_tokens: u32,
        ignore_eos: bool,
        stop_token_ids: Vec<u32>,
        include_stop: bool,
    }
);

mirror_struct!(TokenSpanV1 = TokenSpan { start: u32, end: u32 });

mirror_enum!(
    GrammarSpecV1 = GrammarSpec {
        JsonObject,
        JsonSchema(schema: String),
        Regex(regex: String),
        Choice(choices: Vec<String>),
        Lark(grammar: String),
    }
);

mirror_struct!(
    ResponseOptionsV1 = ResponseOptions {
        instructions: bool,
        previous: Option<[u8; 16]>,
        schema_name: Option<String>,
    }
);

mirror_enum!(
    ClientEndpointV1 = ClientEndpoint { Completions, Responses(options: ResponseOptionsV1), Messages }
);

mirror_struct!(
    ContinuationV1 = Continuation {
        conversation: [u8; 16],
        interaction: [u8; 16],
        choice: u32,
        prefix_tokens: u32,
        edited: bool,
    }
);

mirror_struct!(
    InteractionV1 = Interaction {
        id: [u8; 16],
        created: u64,
        source: PromptSourceV1,
        route: String,
        model: String,
        endpoint: ClientEndpointV1,
        key_id: Option<String>,
        messages: Vec<MessageV1>,
        metadata: BTreeMap<String, String>,
        params: SamplingParamsV1,
        prompt_ids: Vec<u32>,
        template_hash: String,
        stop: Vec<String>,
        held_out: bool,
        chat: ChatOptionsV1,
        grammar: Option<GrammarSpecV1>,
        continues: Option<ContinuationV1>,
    }
);

mirror_struct!(
    SampleV1 = Sample {
        id: [u8; 16],
        interaction: [u8; 16],
        choice: u32,
        origin: SampleOriginV1,
        created: u64,
        ids: Vec<u32>,
        logprobs: Vec<f32>,
        kept: Vec<f32>,
        forced: Vec<TokenSpanV1>,
        text: String,
        finish: FinishReasonV1,
        version: u64,
        params: SamplingParamsV1,
        untrainable: Option<String>,
    }
);

mirror_struct!(
    RewardV1 = Reward {
        id: [u8; 16],
        sample: [u8; 16],
        name: String,
        value: Option<f64>,
        source: RewardSourceV1,
        created: u64,
        idempotency_key: Option<String>,
        comment: Option<String>,
        key_id: Option<String>,
    }
);

mirror_enum!(GroupStateV1 = GroupState { Ready, Trained(step: u64), Dropped(reason: String) });

mirror_struct!(
    GroupV1 = Group {
        id: [u8; 16],
        interaction: [u8; 16],
        route: String,
        members: Vec<[u8; 16]>,
        parts: Vec<String>,
        oldest_version: u64,
        created: u64,
        state: GroupStateV1,
    }
);

mirror_struct!(
    PolicyCheckV2 = PolicyCheck {
        name: String,
        passed: bool,
        value: Option<f64>,
        bound: Option<f64>,
        detail: String,
    }
);

mirror_struct!(
    PolicyRecordV1 = PolicyRecord {
        version: u64,
        parent: Option<u64>,
        step: u64,
        adapter: Option<String>,
        sha256: Option<String>,
        metrics: BTreeMap<String, f64>,
        state: PolicyStateV1,
        reason: Option<String>,
        created: u64,
        pinned: bool,
        checks: Vec<PolicyCheckV2>,
    }
);

mirror_struct!(
    StepRecordV1 = StepRecord {
        step: u64,
        groups: Vec<[u8; 16]>,
        metrics: BTreeMap<String, f64>,
        created: u64,
    }
);
