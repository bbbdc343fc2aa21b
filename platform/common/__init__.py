"""What every app uses: settings, commands, threads, errors, outbound HTTP. No models."""
