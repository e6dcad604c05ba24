//! Earlier stored forms, which are only read.

use std::collections::BTreeMap;

use serde::Deserialize;

use hone_core::types::{
    ChatOptions, ClientEndpoint, Interaction, Message, PolicyRecord, Sample, SamplingParams,
};

use super::records::{
    ChatOptionsV3, FinishReasonV1, GrammarSpecV1, MessageV3, PolicyStateV1, PromptSourceV1, RoleV1,
    SampleOriginV1, SamplingParamsV2,
};
use super::stored::StoredForm;

/// An earlier version of a struct, which is only read: the stored fields in their order, then how the
/// record is made of them.
macro_rules! former_struct {
    ($stored:ident { $($field:ident: $type:ty),+ $(,)? } => $plain:ident |$from:ident| $load:expr) => {
        #[derive(Deserialize)]
        pub(crate) struct $stored { $($field: $type),+ }

        impl $stored {
            pub(crate) fn load(self) -> $plain {
                let $from = self;
                $load
            }
        }
    };
}

former_struct!(
    MessageV1 { role: RoleV1, content: String } => Message |v1| {
        Message::new(v1.role.load(), v1.content)
    }
);

former_struct!(
    SamplingParamsV1 {
        temperature: f32,
        top_p: f32,
        top_k: u32,
        min_p: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        logit_bias: BTreeMap<u32, f32>,
        seed: u64,
        max_tokens: u32,
    } => SamplingParams |v1| SamplingParams {
        temperature: v1.temperature,
        top_p: v1.top_p,
        top_k: v1.top_k,
        min_p: v1.min_p,
        presence_penalty: v1.presence_penalty,
        frequency_penalty: v1.frequency_penalty,
        logit_bias: v1.logit_bias,
        seed: v1.seed,
        max_tokens: v1.max_tokens,
        repetition_penalty: 1.0,
        min_tokens: 0,
        ignore_eos: false,
        stop_token_ids: Vec::new(),
        include_stop: false,
    }
);

former_struct!(
    InteractionV1 {
        id: [u8; 16],
        created: u64,
        source: PromptSourceV1,
        route: String,
        model: String,
        key_id: Option<String>,
        messages: Vec<MessageV1>,
        metadata: BTreeMap<String, String>,
        params: SamplingParamsV1,
        prompt_ids: Vec<u32>,
        template_hash: String,
    } => Interaction |v1| Interaction {
        id: v1.id.load(),
        created: v1.created,
        source: v1.source.load(),
        route: v1.route,
        model: v1.model,
        endpoint: ClientEndpoint::default(),
        key_id: v1.key_id,
        messages: v1.messages.into_iter().map(MessageV1::load).collect(),
        metadata: v1.metadata,
        params: v1.params.load(),
        prompt_ids: v1.prompt_ids,
        template_hash: v1.template_hash,
        stop: Vec::new(),
        held_out: false,
        chat: ChatOptions::default(),
        grammar: None,
        continues: None,
    }
);

former_struct!(
    InteractionV2 {
        id: [u8; 16],
        created: u64,
        source: PromptSourceV1,
        route: String,
        model: String,
        key_id: Option<String>,
        messages: Vec<MessageV1>,
        metadata: BTreeMap<String, String>,
        params: SamplingParamsV1,
        prompt_ids: Vec<u32>,
        template_hash: String,
        stop: Vec<String>,
        held_out: bool,
    } => Interaction |v2| Interaction {
        id: v2.id.load(),
        created: v2.created,
        source: v2.source.load(),
        route: v2.route,
        model: v2.model,
        endpoint: ClientEndpoint::default(),
        key_id: v2.key_id,
        messages: v2.messages.into_iter().map(MessageV1::load).collect(),
        metadata: v2.metadata,
        params: v2.params.load(),
        prompt_ids: v2.prompt_ids,
        template_hash: v2.template_hash,
        stop: v2.stop,
        held_out: v2.held_out,
        chat: ChatOptions::default(),
        grammar: None,
        continues: None,
    }
);

former_struct!(
    InteractionV3 {
        id: [u8; 16],
        created: u64,
        source: PromptSourceV1,
        route: String,
        model: String,
        key_id: Option<String>,
        messages: Vec<MessageV3>,
        metadata: BTreeMap<String, String>,
        params: SamplingParamsV2,
        prompt_ids: Vec<u32>,
        template_hash: String,
        stop: Vec<String>,
        held_out: bool,
        chat: ChatOptionsV3,
        grammar: Option<GrammarSpecV1>,
    } => Interaction |v3| Interaction {
        id: v3.id.load(),
        created: v3.created,
        source: v3.source.load(),
        route: v3.route,
        model: v3.model,
        endpoint: ClientEndpoint::default(),
        key_id: v3.key_id,
        messages: v3.messages.load(),
        metadata: v3.metadata,
        params: v3.params.load(),
        prompt_ids: v3.prompt_ids,
        template_hash: v3.template_hash,
        stop: v3.stop,
        held_out: v3.held_out,
        chat: v3.chat.load(),
        grammar: v3.grammar.load(),
        continues: None,
    }
);

// Version 1 had the least of the kept masses instead of one per token.
former_struct!(
    SampleV1 {
        id: [u8; 16],
        interaction: [u8; 16],
        choice: u32,
        origin: SampleOriginV1,
        created: u64,
        ids: Vec<u32>,
        logprobs: Vec<f32>,
        _kept_mass: f32,
        text: String,
        finish: FinishReasonV1,
        version: u64,
        params: SamplingParamsV1,
        untrainable: Option<String>,
    } => Sample |v1| Sample {
        id: v1.id.load(),
        interaction: v1.interaction.load(),
        choice: v1.choice,
        origin: v1.origin.load(),
        created: v1.created,
        ids: v1.ids,
        logprobs: v1.logprobs,
        kept: Vec::new(),
        forced: Vec::new(),
        text: v1.text,
        finish: v1.finish.load(),
        version: v1.version.load(),
        params: v1.params.load(),
        untrainable: v1.untrainable,
    }
);

former_struct!(
    SampleV2 {
        id: [u8; 16],
        interaction: [u8; 16],
        choice: u32,
        origin: SampleOriginV1,
        created: u64,
        ids: Vec<u32>,
        logprobs: Vec<f32>,
        kept: Vec<f32>,
        text: String,
        finish: FinishReasonV1,
        version: u64,
        params: SamplingParamsV1,
        untrainable: Option<String>,
    } => Sample |v2| Sample {
        id: v2.id.load(),
        interaction: v2.interaction.load(),
        choice: v2.choice,
        origin: v2.origin.load(),
        created: v2.created,
        ids: v2.ids,
        logprobs: v2.logprobs,
        kept: v2.kept,
        forced: Vec::new(),
        text: v2.text,
        finish: v2.finish.load(),
        version: v2.version.load(),
        params: v2.params.load(),
        untrainable: v2.untrainable,
    }
);

former_struct!(
    PolicyRecordV1 {
        version: u64,
        parent: Option<u64>,
        step: u64,
        adapter: Option<String>,
        sha256: Option<String>,
        metrics: BTreeMap<String, f64>,
        state: PolicyStateV1,
        reason: Option<String>,
        created: u64,
    } => PolicyRecord |v1| PolicyRecord {
        version: v1.version.load(),
        parent: v1.parent.load(),
        step: v1.step,
        adapter: v1.adapter,
        sha256: v1.sha256,
        metrics: v1.metrics,
        state: v1.state.load(),
        reason: v1.reason,
        created: v1.created,
        pinned: false,
        checks: Vec::new(),
    }
);
