//! Streams a text, resuming it after lost connections, and cancels another stream: main [PROMPT]
mod grpc;

use grpc::{Status, ALREADY_EXISTS, CANCELLED, RESOURCE_EXHAUSTED, UNAVAILABLE};
use pb::{generate_request::Prompt, GenerateRequest, GenerateResponse, ResumeState, ResumedOutput, SamplingParams};
use std::{env, io::Write, time::Duration, time::Instant};

mod pb {
    include!(concat!(env!("OUT_DIR"), "/pagewire.v1.rs"));
}

const METHOD: &str = "pagewire.v1.InferenceService/Generate";
const PATIENCE: Duration = Duration::from_secs(60);

fn can_resume(status: &Status, again: bool) -> bool {
    match status.code {
        UNAVAILABLE | CANCELLED => true,
        ALREADY_EXISTS | RESOURCE_EXHAUSTED => again,
        _ => false,
    }
}

/// The messages of one attempt, until the output is finished.
async fn attempt(request: &GenerateRequest, mut take: impl FnMut(GenerateResponse)) -> Result<(), Status> {
    let mut client = grpc::connect().await?;
    let mut stream = grpc::call::<GenerateResponse>(&mut client, METHOD, request).await?;
    while let Some(message) = stream.next().await? {
        take(message);
    }
    Ok(())
}

/// Calls `take` with each message, and resumes the stream after a loss.
async fn generate(mut request: GenerateRequest, mut take: impl FnMut(&GenerateResponse)) -> Result<(), Status> {
    let mut state = ResumeState::default();
    let (mut heard, mut is_finished) = (Instant::now(), false);
    loop {
        let result = attempt(&request, |message| {
            heard = Instant::now();
            if message.seed.is_some() {
                (state.seed, state.model_fingerprint) = (message.seed, message.model_fingerprint.clone());
            }
            if state.outputs.is_empty() {
                state.outputs.push(ResumedOutput::default());
            }
            state.outputs[0].token_ids.extend(&message.token_ids);
            is_finished |= message.finish_reason != 0;
            take(&message);
        })
        .await;
        match result {
            Err(status) if !is_finished => {
                if heard.elapsed() > PATIENCE || !can_resume(&status, request.resume.is_some()) {
                    return Err(status);
                }
            }
            _ => return Ok(()),
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        request.resume = Some(state.clone());
        eprintln!("trying again");
    }
}

fn new_request(number: u32) -> GenerateRequest {
    let id = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    GenerateRequest {
        request_id: format!("{id}-{}-{number}", std::process::id()),
        prompt: Some(Prompt::Text(env::args().nth(1).unwrap_or("Once upon a time".into()))),
        sampling: Some(SamplingParams { max_tokens: Some(256), temperature: Some(1.0), ..Default::default() }),
        ..Default::default()
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Status> {
    let mut seed = 0;
    generate(new_request(1), |message| {
        seed = message.seed.unwrap_or(seed);
        print!("{}", message.text);
        let _ = std::io::stdout().flush();
    })
    .await?;
    println!("\nseed {seed}");

    let mut client = grpc::connect().await?;
    let mut stream = grpc::call::<GenerateResponse>(&mut client, METHOD, &new_request(2)).await?;
    stream.next().await?;
    stream.cancel();
    tokio::task::yield_now().await; // the connection's task sends the reset
    println!("cancelled");
    Ok(())
}
