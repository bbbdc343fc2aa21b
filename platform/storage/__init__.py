"""What tenants leave with the installation: files, batches of requests, stored responses."""
